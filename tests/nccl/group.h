/* What a group collects between its start and its end, for comm.c. */
#ifndef NCCL_STANDIN_GROUP_H
#define NCCL_STANDIN_GROUP_H

#include "internal.h"

#pragma GCC visibility push(hidden)

struct comm_init {
    struct comm_init *next;
    struct ncclComm *comm;
    ncclComm_t *out;
    ncclResult_t (*run)(void *init);
};

/* Runs the initialisation now, or at the end of the group. Takes over init. */
ncclResult_t group_add_init(struct comm_init *init);
/* Ends the group without doing anything. */
void group_discard(void);

#pragma GCC visibility pop

#endif
