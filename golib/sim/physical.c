/*
 * Physical memory: one file an allocation, shared-locked (flock) through the
 * one open file description that the handle, exported fds, fds in flight and
 * mappings of all processes refer to. The kernel drops the lock with the last
 * of them, so a file that can be locked exclusively is memory that is gone.
 *
 * Each area has a folder and in it the file "lock": its flock is held by
 * whoever looks for dead files or makes new ones, and its first 8 bytes are an
 * upper bound of the bytes in use, which spares most calls the full look.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <search.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "internal.h"

static const char magic[16] = "amem sim memory";
static const char fabric_magic[8] = "amemfab";
static const uint64_t first_handle = UINT64_C(0x5a0000000000);

struct fabric_handle {
    char magic[8];
    int32_t area;
    char name[SIM_NAME_SIZE];
};
_Static_assert(sizeof(struct fabric_handle) <= sizeof(CUmemFabricHandle), "a fabric handle has 64 bytes");
_Static_assert(sizeof(struct sim_trailer) <= SIM_TRAILER_SIZE, "the trailer has one page");

static struct {
    int folder, lock;
} areas[AREA_COUNT];
static void *table; /* of struct sim_physical, by handle */
static struct sim_physical *dead;
static uint64_t last_serial;

static int compare_handles(const void *a, const void *b)
{
    uint64_t x = ((const struct sim_physical *)a)->handle, y = ((const struct sim_physical *)b)->handle;
    return (x > y) - (x < y);
}

static bool is_area(int area)
{
    return area == AREA_HOST || area == AREA_MULTICAST || (area >= 0 && area < sim_config.devices);
}

static bool open_area(int area)
{
    char path[4096];
    if (area == AREA_HOST)
        snprintf(path, sizeof path, "%s/host", sim_config.dir);
    else if (area == AREA_MULTICAST)
        snprintf(path, sizeof path, "%s/multicast", sim_config.dir);
    else
        snprintf(path, sizeof path, "%s/dev%d", sim_config.dir, area);
    if (mkdir(path, 0700) && errno != EEXIST)
        return false;
    areas[area].folder = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (areas[area].folder < 0)
        return false;
    areas[area].lock = openat(areas[area].folder, "lock", O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    return areas[area].lock >= 0;
}

/* Called by cuInit, once. */
bool sim_areas_open(void)
{
    for (int area = 0; area < AREA_COUNT; area++) {
        if (!is_area(area))
            continue;
        if (!open_area(area)) {
            fprintf(stderr, "simulated driver: can't open area %d in %s: %s\n", area, sim_config.dir, strerror(errno));
            return false;
        }
    }
    return true;
}

void sim_area_lock(int area)
{
    pthread_mutex_lock(&sim_account_lock);
    while (flock(areas[area].lock, LOCK_EX) && errno == EINTR)
        ;
}

/* Unlocks explicitly, since a child on its way to exec has the lock file open too. */
void sim_area_unlock(int area)
{
    flock(areas[area].lock, LOCK_UN);
    pthread_mutex_unlock(&sim_account_lock);
}

static uint64_t read_bound(int area)
{
    uint64_t bytes = 0;
    return pread(areas[area].lock, &bytes, sizeof bytes, 0) == sizeof bytes ? bytes : 0;
}

static bool write_bound(int area, uint64_t bytes)
{
    return pwrite(areas[area].lock, &bytes, sizeof bytes, 0) == sizeof bytes;
}

/* Unlinks the file if nobody refers to it. Returns the bytes it still holds. Callers hold the area's lock. */
static uint64_t reap(int area, const char *name, uint64_t *freed)
{
    struct stat status;
    uint64_t bytes = 0;
    int fd = openat(areas[area].folder, name, O_RDWR | O_CLOEXEC);
    if (fd < 0)
        return 0;
    if (fstat(fd, &status) == 0 && status.st_size > SIM_TRAILER_SIZE)
        bytes = (uint64_t)status.st_size - SIM_TRAILER_SIZE;
    if (flock(fd, LOCK_EX | LOCK_NB) == 0) {
        unlinkat(areas[area].folder, name, 0);
        *freed += bytes;
        bytes = 0;
    }
    close(fd);
    return bytes;
}

/* Looks at every file, so that the bound is exact. Callers hold the area's lock. */
static bool count(int area, uint64_t *bytes)
{
    int fd = openat(areas[area].folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *folder = fd < 0 ? NULL : fdopendir(fd);
    if (!folder) {
        if (fd >= 0)
            close(fd);
        return false;
    }
    uint64_t freed = 0;
    *bytes = 0;
    for (struct dirent *entry; (entry = readdir(folder));)
        if (entry->d_name[0] != '.' && strcmp(entry->d_name, "lock"))
            *bytes += reap(area, entry->d_name, &freed);
    closedir(folder);
    return write_bound(area, *bytes);
}

CUresult sim_physical_usage(int area, uint64_t *bytes)
{
    sim_physical_collect();
    sim_area_lock(area);
    bool counted = count(area, bytes);
    sim_area_unlock(area);
    return counted ? CUDA_SUCCESS : CUDA_ERROR_OPERATING_SYSTEM;
}

/* Returns the description that all others will share, or -1. Callers hold the area's lock. */
static int create_file(struct sim_trailer *trailer)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    static unsigned serial; /* guarded by sim_account_lock */
    snprintf(trailer->name, sizeof trailer->name, "%d-%llx-%u", (int)getpid(),
             (unsigned long long)now.tv_sec * 1000000000u + (unsigned long long)now.tv_nsec, serial++);
    int folder = areas[trailer->area].folder;
    int fd = openat(folder, trailer->name, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd < 0)
        return -1;
    if (flock(fd, LOCK_SH) || ftruncate(fd, (off_t)trailer->size + SIM_TRAILER_SIZE)
        || pwrite(fd, trailer, sizeof *trailer, (off_t)trailer->size) != sizeof *trailer) {
        unlinkat(folder, trailer->name, 0);
        close(fd);
        return -1;
    }
    return fd;
}

/* Callers hold sim_tables_lock. */
static struct sim_physical *add(int fd, const struct sim_trailer *trailer)
{
    struct sim_physical *physical = calloc(1, sizeof *physical);
    if (!physical)
        return NULL;
    /* Never used twice, so that a stale handle is found out. */
    physical->handle = first_handle + ++last_serial * 0x10;
    physical->fd = fd;
    physical->handles = 1;
    physical->trailer = *trailer;
    if (!tsearch(physical, &table, compare_handles)) {
        free(physical);
        return NULL;
    }
    return physical;
}

/* Callers hold the area's lock. */
static bool has_room(int area, uint64_t size)
{
    if (area >= SIM_MAX_DEVICES)
        return true;
    uint64_t used = read_bound(area);
    if (size > sim_config.memory)
        return false;
    if (used > sim_config.memory - size && !count(area, &used))
        return false;
    return used <= sim_config.memory - size && write_bound(area, used + size);
}

CUresult sim_physical_create(const struct sim_trailer *model, struct sim_physical **physical)
{
    struct sim_trailer trailer = *model;
    memcpy(trailer.magic, magic, sizeof magic);
    *physical = NULL;
    CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
    sim_physical_collect();
    sim_area_lock(trailer.area);
    if (has_room(trailer.area, trailer.size)) {
        int fd = create_file(&trailer);
        result = CUDA_ERROR_OPERATING_SYSTEM;
        if (fd >= 0) {
            pthread_mutex_lock(&sim_tables_lock);
            *physical = add(fd, &trailer);
            pthread_mutex_unlock(&sim_tables_lock);
            result = *physical ? CUDA_SUCCESS : CUDA_ERROR_OPERATING_SYSTEM;
            if (!*physical)
                close(fd);
        }
    }
    sim_area_unlock(trailer.area);
    return result;
}

struct sim_physical *sim_physical_find(uint64_t handle)
{
    struct sim_physical key = {.handle = handle};
    struct sim_physical **node = tfind(&key, &table, compare_handles);
    return node ? *node : NULL;
}

void sim_physical_put(struct sim_physical *physical)
{
    if (physical->handles || physical->uses)
        return;
    tdelete(physical, &table, compare_handles);
    sim_multicast_unbind_all(physical);
    physical->next_dead = dead;
    dead = physical;
}

void sim_physical_collect(void)
{
    pthread_mutex_lock(&sim_account_lock);
    pthread_mutex_lock(&sim_tables_lock);
    struct sim_physical *list = dead;
    dead = NULL;
    pthread_mutex_unlock(&sim_tables_lock);
    /* sim_account_lock stays held: a child forked here would keep the fds. */
    while (list) {
        struct sim_physical *physical = list;
        int area = physical->trailer.area;
        list = physical->next_dead;
        while (flock(areas[area].lock, LOCK_EX) && errno == EINTR)
            ;
        uint64_t freed = 0, bound = read_bound(area);
        close(physical->fd);
        reap(area, physical->trailer.name, &freed);
        write_bound(area, bound > freed ? bound - freed : 0);
        flock(areas[area].lock, LOCK_UN);
        free(physical);
    }
    pthread_mutex_unlock(&sim_account_lock);
}

static void close_fd(const void *node, VISIT visit, int depth)
{
    (void)depth;
    if (visit == postorder || visit == leaf)
        close((*(struct sim_physical *const *)node)->fd);
}

/* Called in the child of a fork, which has this one thread. */
void sim_physical_close_all(void)
{
    twalk(table, close_fd);
    for (struct sim_physical *physical = dead; physical; physical = physical->next_dead)
        close(physical->fd);
}

static CUresult create(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *prop, uint64_t flags)
{
    if (!handle || !prop || flags || !size || size % sim_config.granularity || prop->type != CU_MEM_ALLOCATION_TYPE_PINNED)
        return CUDA_ERROR_INVALID_VALUE;
    unsigned types = (unsigned)prop->requestedHandleTypes;
    if (types & ~(unsigned)(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR | CU_MEM_HANDLE_TYPE_FABRIC))
        return CUDA_ERROR_INVALID_VALUE;
    struct sim_trailer trailer = {.size = size, .handle_types = types};
    memcpy(trailer.alloc_flags, &prop->allocFlags, sizeof trailer.alloc_flags);
    if (prop->location.type == CU_MEM_LOCATION_TYPE_DEVICE) {
        if (prop->location.id < 0 || prop->location.id >= sim_config.visible)
            return CUDA_ERROR_INVALID_DEVICE;
        trailer.area = sim_config.physical[prop->location.id];
    } else if (prop->location.type == CU_MEM_LOCATION_TYPE_HOST_NUMA && prop->location.id >= 0) {
        trailer.area = AREA_HOST;
        trailer.numa_node = prop->location.id;
    } else {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (types & CU_MEM_HANDLE_TYPE_FABRIC && !sim_config.fabric)
        return CUDA_ERROR_NOT_PERMITTED;
    struct sim_physical *physical;
    CUresult result = sim_physical_create(&trailer, &physical);
    if (physical)
        *handle = physical->handle;
    return result;
}

static CUresult release(CUmemGenericAllocationHandle handle)
{
    pthread_mutex_lock(&sim_tables_lock);
    struct sim_physical *physical = sim_physical_find(handle);
    bool held = physical && physical->handles;
    if (held) {
        physical->handles--;
        sim_physical_put(physical);
    }
    pthread_mutex_unlock(&sim_tables_lock);
    sim_physical_collect();
    return held ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult get_properties(CUmemAllocationProp *prop, CUmemGenericAllocationHandle handle)
{
    if (!prop)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&sim_tables_lock);
    struct sim_physical *physical = sim_physical_find(handle);
    bool held = physical && physical->handles && physical->trailer.area != AREA_MULTICAST;
    if (held) {
        *prop = (CUmemAllocationProp){.type = CU_MEM_ALLOCATION_TYPE_PINNED};
        prop->requestedHandleTypes = (CUmemAllocationHandleType)physical->trailer.handle_types;
        if (physical->trailer.area == AREA_HOST)
            prop->location = (CUmemLocation){CU_MEM_LOCATION_TYPE_HOST_NUMA, physical->trailer.numa_node};
        else
            prop->location = (CUmemLocation){CU_MEM_LOCATION_TYPE_DEVICE, sim_ordinal(physical->trailer.area)};
        memcpy(&prop->allocFlags, physical->trailer.alloc_flags, sizeof physical->trailer.alloc_flags);
    }
    pthread_mutex_unlock(&sim_tables_lock);
    return held ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult export_handle(void *out, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type, uint64_t flags)
{
    if (!out || flags)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&sim_tables_lock);
    struct sim_physical *physical = sim_physical_find(handle);
    if (!physical || !physical->handles || !(physical->trailer.handle_types & (unsigned)type)) {
        result = CUDA_ERROR_INVALID_VALUE;
    } else if (type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) {
        *(int *)out = fcntl(physical->fd, F_DUPFD_CLOEXEC, 0);
        result = *(int *)out < 0 ? CUDA_ERROR_OPERATING_SYSTEM : CUDA_SUCCESS;
    } else if (type == CU_MEM_HANDLE_TYPE_FABRIC) {
        struct fabric_handle fabric = {.area = physical->trailer.area};
        memcpy(fabric.magic, fabric_magic, sizeof fabric.magic);
        memcpy(fabric.name, physical->trailer.name, sizeof fabric.name);
        memset(out, 0, sizeof(CUmemFabricHandle));
        memcpy(out, &fabric, sizeof fabric);
        result = CUDA_SUCCESS;
    }
    pthread_mutex_unlock(&sim_tables_lock);
    return result;
}

/* Reads what an fd from another process is; false if it is no memory of this driver. */
static bool read_trailer(int fd, struct sim_trailer *trailer)
{
    struct stat status;
    if (fstat(fd, &status) || !S_ISREG(status.st_mode) || status.st_size <= SIM_TRAILER_SIZE)
        return false;
    off_t size = status.st_size - SIM_TRAILER_SIZE;
    return pread(fd, trailer, sizeof *trailer, size) == sizeof *trailer && !memcmp(trailer->magic, magic, sizeof magic)
        && trailer->size == (uint64_t)size && is_area(trailer->area) && memchr(trailer->name, 0, sizeof trailer->name)
        && !strchr(trailer->name, '/');
}

/* Takes the fd. Callers hold sim_tables_lock. */
static CUresult import_fd(int fd, CUmemGenericAllocationHandle *handle)
{
    struct sim_trailer trailer;
    struct sim_physical *physical = NULL;
    if (fd >= 0 && read_trailer(fd, &trailer)) {
        /* The real driver exports no imported handle, multicast objects (which any member may pass on) apart. */
        if (trailer.area != AREA_MULTICAST)
            trailer.handle_types = 0;
        physical = add(fd, &trailer);
    }
    if (!physical) {
        if (fd >= 0)
            close(fd);
        return CUDA_ERROR_UNKNOWN; /* what the real driver says to a foreign fd */
    }
    *handle = physical->handle;
    return CUDA_SUCCESS;
}

/* A description of the file of its own, locked as the owner's is; -1 if the memory is gone. Callers hold the area's lock. */
static int open_living(int area, const char *name)
{
    uint64_t freed = 0;
    if (!reap(area, name, &freed)) {
        uint64_t bound = read_bound(area);
        write_bound(area, bound > freed ? bound - freed : 0);
        return -1;
    }
    int fd = openat(areas[area].folder, name, O_RDWR | O_CLOEXEC);
    if (fd >= 0 && flock(fd, LOCK_SH)) {
        close(fd);
        return -1;
    }
    return fd;
}

static CUresult import_fabric(const void *bytes, CUmemGenericAllocationHandle *handle)
{
    struct fabric_handle fabric;
    memcpy(&fabric, bytes, sizeof fabric);
    if (memcmp(fabric.magic, fabric_magic, sizeof fabric.magic) || !is_area(fabric.area) || !fabric.name[0]
        || !memchr(fabric.name, 0, sizeof fabric.name) || strchr(fabric.name, '/') || fabric.name[0] == '.')
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    sim_area_lock(fabric.area);
    int fd = open_living(fabric.area, fabric.name);
    if (fd >= 0) {
        pthread_mutex_lock(&sim_tables_lock);
        result = import_fd(fd, handle);
        pthread_mutex_unlock(&sim_tables_lock);
    }
    sim_area_unlock(fabric.area);
    return result;
}

CUresult sim_physical_open(int area, const char *name, struct sim_physical **physical)
{
    *physical = NULL;
    if (!is_area(area) || !name[0] || strchr(name, '/') || name[0] == '.')
        return CUDA_ERROR_INVALID_VALUE;
    struct sim_trailer trailer;
    sim_area_lock(area);
    int fd = open_living(area, name);
    if (fd >= 0 && read_trailer(fd, &trailer)) {
        pthread_mutex_lock(&sim_tables_lock);
        *physical = add(fd, &trailer);
        pthread_mutex_unlock(&sim_tables_lock);
    }
    if (fd >= 0 && !*physical)
        close(fd);
    sim_area_unlock(area);
    return *physical ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult import_handle(CUmemGenericAllocationHandle *handle, void *from, CUmemAllocationHandleType type)
{
    if (!handle)
        return CUDA_ERROR_INVALID_VALUE;
    if (type == CU_MEM_HANDLE_TYPE_FABRIC)
        return !from ? CUDA_ERROR_INVALID_VALUE : !sim_config.fabric ? CUDA_ERROR_NOT_PERMITTED : import_fabric(from, handle);
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&sim_tables_lock);
    CUresult result = import_fd(fcntl((int)(intptr_t)from, F_DUPFD_CLOEXEC, 0), handle);
    pthread_mutex_unlock(&sim_tables_lock);
    return result;
}

static CUresult get_granularity(size_t *granularity, const CUmemAllocationProp *prop, int option)
{
    if (!granularity || !prop || option < CU_MEM_ALLOC_GRANULARITY_MINIMUM || option > CU_MEM_ALLOC_GRANULARITY_RECOMMENDED)
        return CUDA_ERROR_INVALID_VALUE;
    if (prop->location.type == CU_MEM_LOCATION_TYPE_DEVICE && (prop->location.id < 0 || prop->location.id >= sim_config.visible))
        return CUDA_ERROR_INVALID_DEVICE;
    *granularity = sim_config.granularity;
    return CUDA_SUCCESS;
}

SIM_FUNCTION(cuMemCreate, cuMemCreate, 10020, NEEDS_INIT,
             (CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *prop, unsigned long long flags),
             create(handle, size, prop, flags))
SIM_FUNCTION(cuMemRelease, cuMemRelease, 10020, NEEDS_INIT, (CUmemGenericAllocationHandle handle), release(handle))
SIM_FUNCTION(cuMemGetAllocationPropertiesFromHandle, cuMemGetAllocationPropertiesFromHandle, 10020, NEEDS_INIT,
             (CUmemAllocationProp *prop, CUmemGenericAllocationHandle handle), get_properties(prop, handle))
SIM_FUNCTION(cuMemGetAllocationGranularity, cuMemGetAllocationGranularity, 10020, NEEDS_INIT,
             (size_t *granularity, const CUmemAllocationProp *prop, CUmemAllocationGranularity_flags option),
             get_granularity(granularity, prop, (int)option))
SIM_FUNCTION(cuMemExportToShareableHandle, cuMemExportToShareableHandle, 10020, NEEDS_INIT,
             (void *out, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type, unsigned long long flags),
             export_handle(out, handle, type, flags))
SIM_FUNCTION(cuMemImportFromShareableHandle, cuMemImportFromShareableHandle, 10020, NEEDS_INIT,
             (CUmemGenericAllocationHandle *handle, void *from, CUmemAllocationHandleType type),
             import_handle(handle, from, type))
