/*
 * A stand-in for libnvidia-ml.so.1: what PyTorch's allocator asks it. Devices
 * are in no fabric, and no process is known.
 */
#include <stddef.h>
#include <string.h>

#define API __attribute__((visibility("default")))

enum { SUCCESS = 0, NOT_SUPPORTED = 3 }; /* nvmlReturn_t */

/* nvmlGpuFabricInfoV_t. State 0: the device has no fabric. */
struct fabric_info {
    unsigned version;
    unsigned char cluster[16];
    int status;
    unsigned clique;
    unsigned char state;
    unsigned health;
};

static int device; /* all of them */

API int nvmlInit_v2(void);
API int nvmlSystemGetCudaDriverVersion_v2(int *version);
API int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **handle);
API int nvmlDeviceGetComputeRunningProcesses(void *handle, unsigned *count, void *processes);
API int nvmlDeviceGetGpuFabricInfoV(void *handle, struct fabric_info *info);
API int nvmlDeviceGetNvLinkRemoteDeviceType(void *handle, unsigned link, int *type);
API int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *handle, unsigned link, void *pci);

int nvmlInit_v2(void) { return SUCCESS; }

int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    *version = 13000;
    return SUCCESS;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **handle) {
    (void)id;
    *handle = &device;
    return SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses(void *handle, unsigned *count, void *processes) {
    (void)handle, (void)processes;
    *count = 0;
    return SUCCESS;
}

int nvmlDeviceGetGpuFabricInfoV(void *handle, struct fabric_info *info) {
    (void)handle;
    memset((char *)info + sizeof info->version, 0, offsetof(struct fabric_info, health) - sizeof info->version);
    return SUCCESS;
}

int nvmlDeviceGetNvLinkRemoteDeviceType(void *handle, unsigned link, int *type) {
    (void)handle, (void)link, (void)type;
    return NOT_SUPPORTED;
}

int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *handle, unsigned link, void *pci) {
    (void)handle, (void)link, (void)pci;
    return NOT_SUPPORTED;
}
