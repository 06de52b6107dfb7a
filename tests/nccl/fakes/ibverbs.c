/*
 * A stand-in for libibverbs.so.1: registrations succeed and are counted. Built
 * with ibverbs.map, which gives the functions the versions that NCCL asks for.
 */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

struct ibv_mr {
    void *context, *pd, *addr;
    size_t length;
    uint32_t handle, lkey, rkey;
};

void *ibv_reg_mr(void *pd, void *addr, size_t length, int access);
void *ibv_reg_mr_iova2(void *pd, void *addr, size_t length, uint64_t iova, unsigned access);
void *ibv_reg_dmabuf_mr(void *pd, uint64_t offset, size_t length, uint64_t iova, int fd, int access);
int ibv_dereg_mr(struct ibv_mr *mr);
int ibv_standin_registered(void);

static int registered;

static void *add(void *pd, void *addr, size_t length) {
    struct ibv_mr *mr = calloc(1, sizeof *mr);
    if (mr == NULL) return NULL;
    mr->pd = pd;
    mr->addr = addr;
    mr->length = length;
    __atomic_add_fetch(&registered, 1, __ATOMIC_SEQ_CST);
    return mr;
}

void *ibv_reg_mr(void *pd, void *addr, size_t length, int access) {
    (void)access;
    return add(pd, addr, length);
}

void *ibv_reg_mr_iova2(void *pd, void *addr, size_t length, uint64_t iova, unsigned access) {
    (void)iova, (void)access;
    return add(pd, addr, length);
}

void *ibv_reg_dmabuf_mr(void *pd, uint64_t offset, size_t length, uint64_t iova, int fd, int access) {
    (void)offset, (void)access;
    return fd < 0 ? NULL : add(pd, (void *)(uintptr_t)iova, length);
}

int ibv_dereg_mr(struct ibv_mr *mr) {
    free(mr);
    __atomic_sub_fetch(&registered, 1, __ATOMIC_SEQ_CST);
    return 0;
}

/* How many registrations of this process are live. */
int ibv_standin_registered(void) { return __atomic_load_n(&registered, __ATOMIC_SEQ_CST); }
