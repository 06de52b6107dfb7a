/*
 * Functions of other libraries for which their callers get amem's. Two kinds:
 *
 * NCCL's own suspension (2.29.7 and later) gives the memory back that amem
 * manages. The two must not both: while amem manages it, suspension is refused.
 *
 * What is registered with a NIC, or pinned for GDRCopy, must stay where it is until that ends.
 * libnccl looks these functions up, but its network plug-ins, and programs that
 * transfer tensors, are linked with them.
 *
 * Callers come to a function by slots, by dlsym, and under other names of it
 * (pncclCommSuspend). So the library's own symbol table is changed, by which the
 * dynamic linker answers all of them from then on, and the slots that were bound
 * before.
 */
#include <stdint.h>
#include <string.h>

#include "hook.h"

/* A process may have several copies of a library; each wrapper calls its own copy's function. */
enum { COPIES = 4 };
#define EACH_COPY(X) X(0) X(1) X(2) X(3)

struct copies {
    size_t base[COPIES];
    int count;
};

struct function {
    const char *symbol;
    void *wrappers[COPIES];
    void **real; /* COPIES of them */
};

/* The number of this copy, or -1 if there are too many. */
static int copy_of(struct copies *copies, const struct object *object) {
    int copy = 0;
    elf_lock_writing();
    while (copy < copies->count && copies->base[copy] != object->base) copy++;
    if (copy == COPIES)
        copy = -1;
    else if (copy == copies->count)
        copies->base[copies->count++] = object->base;
    elf_unlock_writing();
    return copy;
}

/* What a library calls of itself is its own business. */
static void divert(const struct object *object, const struct function *functions, size_t n, struct copies *copies) {
    enum { MOST = 9 };
    struct rebinding list[MOST];
    int count = 0;
    for (size_t i = 0; i < n; i++) {
        void *from = elf_find(object, functions[i].symbol);
        if (!from) continue; /* a release without it, or diverted already: then it is no function of this object */
        int copy = copy_of(copies, object);
        for (int k = 0; k < COPIES; k++)
            if (from == functions[i].wrappers[k]) from = NULL;
        if (!from) continue;
        if (copy < 0) {
            log_line(LOG_ERROR, "%s: more than %d copies of this library: its %s goes past amem", object->path, COPIES,
                     functions[i].symbol);
            continue;
        }
        void *to = functions[i].wrappers[copy];
        __atomic_store_n(&functions[i].real[copy], from, __ATOMIC_RELEASE);
        if (!elf_divert(object, from, to))
            log_line(LOG_ERROR,
                     "%s: its symbol table can't be written (a policy of SELinux?): who looks %s up in it goes past amem",
                     object->path, functions[i].symbol);
        if (count < MOST) list[count++] = (struct rebinding){from, to};
    }
    if (count > 0) elf_rebind(object, list, count);
}

/* ---- NCCL's own suspension ---- */

enum { NCCL_INVALID_USAGE = 5 };

static void *nccl_suspend[COPIES], *nccl_resume[COPIES], *nccl_last_error[COPIES];

/* Why this thread's last call of NCCL's was refused, until it asks. */
static __thread const char *refused;

/* Whether amem manages NCCL's memory, so that the call must not reach NCCL. */
static bool refuse(const char *text) {
    static atomic_flag told = ATOMIC_FLAG_INIT;
    if (!core_loaded()) return false;
    refused = text;
    api_fail(AMEM_ERROR_INVALID_STATE, text);
    /* Callers suspend each communicator, once a step. */
    log_line(atomic_flag_test_and_set(&told) ? LOG_DEBUG : LOG_ERROR, "%s", text);
    return true;
}

#define REFUSED(function, instead)                                                                            \
    "amem refused " function ": amem manages NCCL's memory in this process, and only one may give it back. " \
    "Call " instead ", which is for all communicators, or run without AMEM_ENABLE"

#define NCCL_COPY(n)                                                                                             \
    static int suspend_##n(void *comm, int flags) {                                                              \
        if (refuse(REFUSED("ncclCommSuspend", "amem.pause(\"nccl\")"))) return NCCL_INVALID_USAGE;               \
        return ((int (*)(void *, int))nccl_suspend[n])(comm, flags);                                             \
    }                                                                                                            \
    static int resume_##n(void *comm) {                                                                          \
        if (refuse(REFUSED("ncclCommResume", "amem.resume(\"nccl\")"))) return NCCL_INVALID_USAGE;               \
        return ((int (*)(void *))nccl_resume[n])(comm);                                                          \
    }                                                                                                            \
    static const char *last_error_##n(void *comm) {                                                              \
        const char *text = refused;                                                                              \
        refused = NULL;                                                                                          \
        return text ? text : ((const char *(*)(void *))nccl_last_error[n])(comm);                                \
    }
EACH_COPY(NCCL_COPY)

#define WRAPPERS(name) {name##_0, name##_1, name##_2, name##_3}

void divert_nccl(const struct object *object) {
    static const struct function suspension[] = {
        {"ncclCommSuspend", WRAPPERS(suspend), nccl_suspend},
        {"ncclCommResume", WRAPPERS(resume), nccl_resume},
        /* PyTorch puts its answer into the error that it raises. */
        {"ncclGetLastError", WRAPPERS(last_error), nccl_last_error},
    };
    static struct copies copies;
    if (elf_find(object, suspension[0].symbol)) divert(object, suspension, sizeof suspension / sizeof *suspension, &copies);
}

/* ---- registration with a NIC, and for GDRCopy ---- */

static void *verbs_reg_mr[COPIES], *verbs_reg_mr_iova[COPIES], *verbs_reg_mr_iova2[COPIES], *verbs_reg_dmabuf[COPIES];
static void *verbs_dereg_mr[COPIES], *mlx5_reg_dmabuf[COPIES], *gdr_pin[COPIES], *gdr_pin_v2[COPIES], *gdr_unpin[COPIES];

/* The real function of a copy, and how it is called. */
#define REAL(function, n, result, ...) ((result(*)(__VA_ARGS__))function[n])

/*
 * A call is under way on this thread. Of those that the library makes of itself
 * meanwhile, which come here where it is bound lazily, nothing is noted.
 */
static __thread bool inside;

/* Registers memory at an address, by a call that answers a struct ibv_mr *. */
#define REGISTER(addr, length, call)                                             \
    do {                                                                         \
        if (inside) return call;                                                 \
        uint64_t kept = driver_keep((uintptr_t)(addr), length, AMEM_KEEP_NIC);   \
        inside = true;                                                           \
        void *mr = call;                                                         \
        inside = false;                                                          \
        driver_registered(kept, (uintptr_t)mr);                                  \
        return mr;                                                               \
    } while (0)

/* The same, by a call that answers 0, and the registration in *handle. */
#define PIN(addr, size, call)                                                    \
    do {                                                                         \
        if (inside) return call;                                                 \
        uint64_t kept = driver_keep(addr, size, AMEM_KEEP_NIC);                  \
        inside = true;                                                           \
        int failed = call;                                                       \
        inside = false;                                                          \
        driver_registered(kept, failed ? 0 : *handle);                           \
        return failed;                                                           \
    } while (0)

/* Ends a registration, by a call that answers 0. */
#define UNREGISTER(registration, call)                                           \
    do {                                                                         \
        if (inside) return call;                                                 \
        uint64_t kept = driver_deregister((uintptr_t)(registration));            \
        inside = true;                                                           \
        int failed = call;                                                       \
        inside = false;                                                          \
        driver_registered(kept, failed ? (uintptr_t)(registration) : 0);         \
        return failed;                                                           \
    } while (0)

/*
 * A dma-buf's memory is known by the address that the NIC will know it by: NCCL, and
 * the libraries that its plug-ins use, let that be the memory's own.
 */
#define REGISTRATION_COPY(n)                                                                                          \
    static void *reg_mr_##n(void *pd, void *addr, size_t length, int access) {                                        \
        REGISTER(addr, length,                                                                                        \
                 REAL(verbs_reg_mr, n, void *, void *, void *, size_t, int)(pd, addr, length, access));               \
    }                                                                                                                 \
    static void *reg_mr_iova_##n(void *pd, void *addr, size_t length, uint64_t iova, int access) {                    \
        REGISTER(addr, length,                                                                                        \
                 REAL(verbs_reg_mr_iova, n, void *, void *, void *, size_t, uint64_t, int)(pd, addr, length, iova,    \
                                                                                           access));                  \
    }                                                                                                                 \
    static void *reg_mr_iova2_##n(void *pd, void *addr, size_t length, uint64_t iova, unsigned access) {              \
        REGISTER(addr, length,                                                                                        \
                 REAL(verbs_reg_mr_iova2, n, void *, void *, void *, size_t, uint64_t, unsigned)(pd, addr, length,    \
                                                                                                 iova, access));      \
    }                                                                                                                 \
    static void *reg_dmabuf_##n(void *pd, uint64_t offset, size_t length, uint64_t iova, int fd, int access) {        \
        REGISTER(iova, length,                                                                                        \
                 REAL(verbs_reg_dmabuf, n, void *, void *, uint64_t, size_t, uint64_t, int, int)(pd, offset, length,  \
                                                                                                 iova, fd, access));  \
    }                                                                                                                 \
    static void *reg_dmabuf_mlx5_##n(void *pd, uint64_t offset, size_t length, uint64_t iova, int fd, int access,     \
                                     int mlx5_access) {                                                               \
        REGISTER(iova, length,                                                                                        \
                 REAL(mlx5_reg_dmabuf, n, void *, void *, uint64_t, size_t, uint64_t, int, int, int)(                 \
                     pd, offset, length, iova, fd, access, mlx5_access));                                             \
    }                                                                                                                 \
    static int dereg_mr_##n(void *mr) { UNREGISTER(mr, REAL(verbs_dereg_mr, n, int, void *)(mr)); }                   \
    static int pin_##n(void *gdr, unsigned long addr, size_t size, uint64_t token, uint32_t space,                    \
                       unsigned long *handle) {                                                                       \
        PIN(addr, size,                                                                                               \
            REAL(gdr_pin, n, int, void *, unsigned long, size_t, uint64_t, uint32_t, unsigned long *)(                \
                gdr, addr, size, token, space, handle));                                                              \
    }                                                                                                                 \
    static int pin_v2_##n(void *gdr, unsigned long addr, size_t size, uint32_t flags, unsigned long *handle) {        \
        PIN(addr, size,                                                                                               \
            REAL(gdr_pin_v2, n, int, void *, unsigned long, size_t, uint32_t, unsigned long *)(gdr, addr, size,       \
                                                                                               flags, handle));       \
    }                                                                                                                 \
    /* gdr_mh_t is a structure of one unsigned long, which is passed as that is. */                                   \
    static int unpin_##n(void *gdr, unsigned long handle) {                                                           \
        UNREGISTER(handle, REAL(gdr_unpin, n, int, void *, unsigned long)(gdr, handle));                              \
    }
EACH_COPY(REGISTRATION_COPY)

static const struct function registration[] = {
    {"ibv_reg_mr", WRAPPERS(reg_mr), verbs_reg_mr},
    {"ibv_reg_mr_iova", WRAPPERS(reg_mr_iova), verbs_reg_mr_iova},
    {"ibv_reg_mr_iova2", WRAPPERS(reg_mr_iova2), verbs_reg_mr_iova2},
    {"ibv_reg_dmabuf_mr", WRAPPERS(reg_dmabuf), verbs_reg_dmabuf},
    {"ibv_dereg_mr", WRAPPERS(dereg_mr), verbs_dereg_mr},
    {"mlx5dv_reg_dmabuf_mr", WRAPPERS(reg_dmabuf_mlx5), mlx5_reg_dmabuf},
    {"gdr_pin_buffer", WRAPPERS(pin), gdr_pin},
    {"gdr_pin_buffer_v2", WRAPPERS(pin_v2), gdr_pin_v2},
    {"gdr_unpin_buffer", WRAPPERS(unpin), gdr_unpin},
};
enum { REGISTRATION = sizeof registration / sizeof *registration };

/* Where a symbol table could not be written, NCCL at least gets the wrapper. */
void *divert_lookup(void *function) {
    for (int i = 0; i < REGISTRATION; i++)
        for (int k = 0; k < COPIES; k++)
            if (function && registration[i].real[k] == function) return registration[i].wrappers[k];
    return function;
}

/* Wheels add to the names of the libraries that they bring. */
static const char *const registering[] = {"libibverbs", "libmlx5", "libgdrapi"};
enum { REGISTERING = sizeof registering / sizeof *registering };

static bool is_named(const struct object *object, const char *name) {
    const char *slash = strrchr(object->path, '/');
    return !strncmp(slash ? slash + 1 : object->path, name, strlen(name));
}

bool divert_registers(const struct object *object) {
    for (int i = 0; i < REGISTERING; i++)
        if (is_named(object, registering[i])) return true;
    return false;
}

void divert_registration(const struct object *object) {
    static struct copies copies[REGISTERING];
    for (int i = 0; i < REGISTERING; i++)
        if (is_named(object, registering[i])) divert(object, registration, REGISTRATION, &copies[i]);
}
