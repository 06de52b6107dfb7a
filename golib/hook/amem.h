/*
 * amem: give the GPU memory that NCCL holds back to the device while the
 * process lives on, and restore it at the same addresses with the same
 * contents; and the same for a program's own memory, in tagged regions.
 *
 * Link with, or preload, libamem_hook.so. It loads the rest of amem when NCCL
 * first asks for the CUDA driver, or with the first region. Every function may be called from any
 * thread; none of them exits or aborts the process.
 */
#ifndef AMEM_H
#define AMEM_H

#include <stddef.h>
#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

#define AMEM_VERSION "0.1.0"

typedef enum {
    AMEM_OK = 0,
    AMEM_ERROR_NOT_ENABLED = 1,    /* amem_enable was not called, or failed */
    AMEM_ERROR_TOO_LATE = 2,       /* NCCL had the driver's functions before amem was enabled */
    AMEM_ERROR_NO_NCCL = 3,        /* no libnccl.so.2 is loaded in this process */
    AMEM_ERROR_NO_DRIVER = 4,      /* no libcuda.so.1, or no device */
    AMEM_ERROR_NO_CUMEM = 5,       /* NCCL allocates with cudaMalloc: nothing can be paused */
    AMEM_ERROR_INVALID_ARGUMENT = 6,
    AMEM_ERROR_INVALID_STATE = 7,  /* not possible in the present state (a group ID set too late, ...) */
    AMEM_ERROR_TIMEOUT = 8,        /* a peer or the device did not answer within AMEM_TIMEOUT_S */
    AMEM_ERROR_OUT_OF_MEMORY = 9,  /* device memory on resume: the process stays paused, call again */
    AMEM_ERROR_HOST_MEMORY = 10,   /* host memory on pause: the process stays active */
    AMEM_ERROR_CUDA = 11,          /* a driver call failed; the message names it */
    AMEM_ERROR_PEER = 12,          /* a peer process failed or is gone */
    AMEM_ERROR_FORKED = 13,        /* a child of fork() of a process that had loaded amem */
    AMEM_ERROR_CORE = 14,          /* libamem_nccl.so is missing or of another version */
    AMEM_ERROR_INTERNAL = 15
} amem_status;

typedef enum {
    AMEM_STATE_OFF = 0,      /* not enabled in this process */
    AMEM_STATE_WAITING = 1,  /* enabled; libnccl is not loaded yet, or has not asked for the driver yet */
    AMEM_STATE_ACTIVE = 2,
    AMEM_STATE_PAUSED = 3
} amem_state_t;

/*
 * Hooks the libnccl.so.2 that is loaded, or the one that will be. Call it
 * before the first NCCL communicator. Calling it again does nothing.
 */
amem_status amem_enable(void);

/*
 * Gives back, or restores, the memory of the tags: a comma-separated list, or
 * NULL for all. NCCL's is "nccl"; regions name the others. What is paused already is left
 * alone, but what was allocated since is given back too. A pause of all fails, with
 * AMEM_ERROR_TOO_LATE, where NCCL is in use and was not hooked. A pause
 * that fails leaves the process as it was. A resume that fails leaves each tag
 * either restored or paused. amem_last_error() says what to do.
 */
amem_status amem_pause(const char *tags);
amem_status amem_resume(const char *tags);

/*
 * What this thread's last amem_pause or amem_resume did, as JSON text that is
 * valid until its next: changed (false: all was so already), seconds, bytes (of
 * device memory), copied_bytes; tags, those that were active and are paused now, or
 * the other way round; held_bytes, how much of bytes is not free yet since peers had
 * not let go of it when a pause's deadline passed, and held_by, a list of these peers:
 * pid, group, bytes. "" if it failed.
 */
const char *amem_last_report(void);

/* Paused if any tag is. */
amem_state_t amem_state(void);

/*
 * Of one tag; AMEM_STATE_OFF if there is none of this name, and of "nccl" where amem is
 * not enabled, or NCCL was in use before it was.
 */
amem_state_t amem_tag_state(const char *tag);

/* Regions: device memory of the program's own, which pauses with its tag. */

typedef enum {
    AMEM_BACKUP_NONE = 0, /* contents are lost by a pause; new memory has any contents */
    AMEM_BACKUP_CPU = 1,  /* contents are kept in pinned host memory */
    AMEM_BACKUP_DISK = 2  /* contents are kept in a file, see amem_set_disk_directory */
} amem_backup_t;

/*
 * The functions that torch.cuda.memory's pluggable allocator wants. size:
 * bytes; device: its ordinal; stream: a cudaStream_t, not used. allocate answers
 * NULL when it fails, and amem_last_error() says why. Any thread may call them.
 */
typedef struct {
    void *(*allocate)(ssize_t size, int device, void *stream);
    void (*deallocate)(void *ptr, ssize_t size, int device, void *stream);
} amem_region_t;

/*
 * The region of a tag and a backup, made if there is none yet. A tag is 1 to 64
 * bytes without commas, and not "nccl". A process has at most 128 regions.
 */
amem_status amem_region(const char *tag, amem_backup_t backup, amem_region_t *region);

/*
 * From now on PyTorch's own allocator, which calls cudaMalloc, gets the memory of
 * this region, on all threads. tag NULL: ordinary memory again; what was given
 * stays the region's. The region is made at the first cudaMalloc.
 */
amem_status amem_default_region(const char *tag, amem_backup_t backup);

/* The functions for ordinary memory, the CUDA runtime's, whatever the default region is. */
amem_status amem_ordinary_memory(amem_region_t *region);

/*
 * Regions leave so many bytes free on a device: an allocation that would not is
 * out of memory. A resume may use them. 0, as at first: none.
 */
void amem_set_memory_margin(size_t bytes);

/* Whether the memory at ptr is paused; AMEM_STATE_OFF if it is not a region's. */
amem_state_t amem_memory_state(const void *ptr);

/*
 * The contents of paused memory that has a backup: copied to a buffer of size
 * bytes, or where they are on the host, until the tag is resumed. The latter
 * fails where they are not in one piece there. The driver refuses a copy of more than
 * one pinned part of it, of up to 32 MB each; PyTorch's copies are cut at the parts. Of memory that is not paused: what
 * its last pause kept, if that was retained, else AMEM_ERROR_INVALID_STATE.
 */
amem_status amem_read_backup(const void *ptr, size_t size, void *to);
amem_status amem_backup_pointer(const void *ptr, size_t size, const void **backup);

/* Where AMEM_BACKUP_DISK keeps files; AMEM_DISK_DIRECTORY, else /var/tmp. */
amem_status amem_set_disk_directory(const char *path);

/*
 * For what takes the place of another library. The first is as above, but the
 * files have names, several for a pause, until the resume. The second: whether a
 * resume, from now on, leaves the backups in host memory readable and where they
 * are, until the next pause writes to the same place, the memory is freed, or
 * amem_free_host_memory() is called.
 */
amem_status amem_set_named_disk_directory(const char *path);
void amem_retain_backups(int on);

/*
 * Statistics as JSON text, to be released with amem_free(); NULL on failure.
 * Sizes are bytes, times are seconds. docs/statistics.md lists the fields.
 */
char *amem_stats_json(void);
void amem_free(char *text);

/*
 * Gives the pinned host memory back that pauses of the tags (as of amem_pause())
 * have kept contents in, and that is kept for the next. Not while paused. Waits
 * until the devices have no work: the driver would let no thread launch a kernel
 * before that. No thread may capture a graph meanwhile: the driver refuses to wait
 * then (AMEM_ERROR_CUDA), and the capture is lost.
 */
amem_status amem_free_host_memory(const char *tags);

/* Keeps jobs apart that share GPUs. Set it before the first communicator. */
amem_status amem_set_group_id(int group);
amem_status amem_get_group_id(int *group);

/*
 * The figures of this thread's last failure as JSON text, "" where it has none. Sizes are bytes:
 * device, needed_bytes and free_bytes of AMEM_ERROR_OUT_OF_MEMORY; needed_bytes, of
 * a disk free_bytes too, of AMEM_ERROR_HOST_MEMORY; waiting_for, a list of pid and
 * group, of AMEM_ERROR_TIMEOUT, where it waited for processes.
 */
const char *amem_last_error_json(void);

/* Why this thread's last call of a function above failed; "" if it did not. */
const char *amem_last_error(void);

/*
 * Why amem could not be enabled in this process, or its core not be loaded; "" if
 * neither failed. Errors of later calls say it too.
 */
const char *amem_failure(void);

/* The release of the library; the same text as AMEM_VERSION. */
const char *amem_version(void);

/*
 * The NCCL extensions of AMem, with ncclResult_t values. The communicator is
 * accepted and ignored: pause and resume are process-wide.
 */
typedef struct ncclComm *amem_ncclComm_t;
int ncclPause(amem_ncclComm_t *comm);
int ncclResume(amem_ncclComm_t *comm);
int ncclMemStats(void); /* writes the statistics to the log */
int ncclSetGroupID(int group);
int ncclGetGroupID(int *group);

/*
 * torch_memory_saver's functions, which programs look up in the process. tag NULL:
 * all regions, without NCCL's memory; an unknown tag does nothing. They answer an
 * amem_status.
 */
int tms_pause(const char *tag);
int tms_resume(const char *tag);

#ifdef __cplusplus
}
#endif
#endif
