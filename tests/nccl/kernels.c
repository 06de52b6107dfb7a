/*
 * What runs on the streams. Data moves only through the connections' buffers,
 * and each side's step counters live in device memory, so that bytes that are
 * lost there hang or stop a later collective, as they would with NCCL. The
 * simulated driver runs each function on its stream's own thread.
 */
#include "internal.h"

#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

CUfunction collective_function, p2p_function, verify_function;

enum { SENDER, RECEIVER };
enum { LL, SIMPLE, DIRECT };

struct transfer {
    struct transfer *before; /* the earlier one on the same connection, or NULL */
    struct dev_conn *conn;
    uint8_t *data;
    size_t bytes, done;
    uint64_t remote;
    int side, proto, peer, channel, dtype;
    bool sum, open, finished;
};

struct kernel {
    const struct dev_comm *comm;
    struct transfer *transfers;
    int ntransfers, capacity;
    bool drained[MAX_CHANNELS][MAX_RANKS];
    bool received[MAX_CHANNELS][MAX_RANKS];
};

uint64_t mix(uint64_t x) {
    x += 0x9e3779b97f4a7c15ull;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    return x ^ x >> 31;
}

uint64_t checksum_of(const void *data, size_t size) {
    const unsigned char *p = data;
    uint64_t h = 0x243f6a8885a308d3ull ^ size;
    for (; size >= 8; p += 8, size -= 8) {
        uint64_t w;
        memcpy(&w, p, 8);
        h = (h ^ w) * 0x9fb21c651e98df25ull;
        h ^= h >> 29;
    }
    for (; size > 0; p++, size--) h = (h ^ *p) * 0x100000001b3ull;
    return h ^ h >> 32;
}

size_t dtype_size(int dtype) {
    switch (dtype) {
    case ncclInt8:
    case ncclUint8:
    case ncclFloat8e4m3:
    case ncclFloat8e5m2:
        return 1;
    case ncclFloat16:
    case ncclBfloat16:
        return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32:
        return 4;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64:
        return 8;
    default:
        return 0;
    }
}

static uint64_t load(const uint64_t *p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
static void store(uint64_t *p, uint64_t value) { __atomic_store_n(p, value, __ATOMIC_RELEASE); }

/* The device's state is not what it was left as: nothing after this could be trusted. */
__attribute__((format(printf, 2, 3), noreturn)) static void broken(const struct dev_comm *comm, const char *format, ...) {
    char text[512];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    fprintf(stderr, "nccl stand-in: pid %d rank %d of %d: %s\n", (int)getpid(), comm->rank, comm->nranks, text);
    abort();
}

static bool kernel_aborted(const struct dev_comm *comm) {
    return __atomic_load_n((const uint32_t *)(uintptr_t)comm->abort_flag, __ATOMIC_ACQUIRE) != 0;
}

static void check_access(int dev, uint64_t ptr, size_t size, int write) {
    if (driver.cuSimCheckAccess != NULL && size > 0) driver.cuSimCheckAccess(dev, ptr, size, write);
}

struct wait {
    unsigned turns;
    double since;
};

/* False when the wait has lasted too long. */
static bool back_off(struct wait *wait) {
    if (wait->turns == 0) wait->since = now_seconds();
    if (++wait->turns < 16) {
        sched_yield();
        return true;
    }
    unsigned doublings = (wait->turns - 16) / 4;
    struct timespec pause = {.tv_nsec = doublings < 6 ? 4000 << doublings : 200000};
    nanosleep(&pause, NULL);
    return now_seconds() - wait->since < options.timeout_s;
}

/* ---- sums ---- */

#define SUM(type)                                                                                                    \
    do {                                                                                                             \
        type *d = (type *)(void *)dst;                                                                               \
        const type *s = (const type *)(const void *)src;                                                             \
        for (size_t i = 0; i < bytes / sizeof(type); i++) d[i] = (type)(d[i] + s[i]);                                \
    } while (0)

/* Integers wrap: unsigned arithmetic gives the same bits for both signs. */
static void sum_into(uint8_t *dst, const uint8_t *src, size_t bytes, int dtype) {
    switch (dtype) {
    case ncclFloat32:
        SUM(float);
        break;
    case ncclFloat64:
        SUM(double);
        break;
    case ncclInt32:
    case ncclUint32:
        SUM(uint32_t);
        break;
    case ncclInt64:
    case ncclUint64:
        SUM(uint64_t);
        break;
    default:
        SUM(uint8_t);
    }
}

/* ---- one step of a transfer ---- */

static struct send_mem *send_mem_of(uint64_t p) { return (struct send_mem *)(uintptr_t)p; }
static struct recv_mem *recv_mem_of(uint64_t p) { return (struct recv_mem *)(uintptr_t)p; }

static uint64_t *ll_slot(uint64_t recv_mem, uint64_t step) {
    return (uint64_t *)(uintptr_t)(recv_mem + LL_OFFSET + step % STEPS * LL_SLOT);
}

static uint8_t *simple_slot(const struct dev_comm *comm, uint64_t recv_mem, uint64_t step) {
    return (uint8_t *)(uintptr_t)(recv_mem + SIMPLE_OFFSET + step % STEPS * (comm->buffsize / STEPS));
}

static size_t step_bytes(const struct dev_comm *comm, const struct transfer *t) {
    size_t left = t->bytes - t->done;
    size_t most = t->proto == LL ? LL_DATA : t->proto == SIMPLE ? comm->buffsize / STEPS : left;
    return left < most ? left : most;
}

/* Each line carries its own flag, so that no other word has to say that it has arrived. */
static void ll_write(uint64_t *line, const uint8_t *data, size_t bytes, uint32_t flag) {
    uint64_t sum = checksum_of(data, bytes);
    for (; bytes > 0; line++) {
        uint32_t word = 0;
        size_t n = bytes < 4 ? bytes : 4;
        memcpy(&word, data, n);
        data += n;
        bytes -= n;
        store(line, (uint64_t)flag << 32 | word);
    }
    store(line, (uint64_t)flag << 32 | (uint32_t)sum);
}

static bool ll_read(const struct dev_comm *comm, const struct transfer *t, const uint64_t *line, uint8_t *data,
                    size_t bytes, uint32_t flag) {
    uint8_t *start = data;
    size_t total = bytes;
    for (;; line++) {
        uint64_t value = load(line);
        uint32_t seen = (uint32_t)(value >> 32), word = (uint32_t)value;
        if (seen != flag) {
            if (seen > flag || (seen != 0 && (flag - seen) % STEPS != 0)) {
                broken(comm, "flag %u from rank %d on channel %d, where %u was to come", seen, t->peer, t->channel, flag);
            }
            return false;
        }
        if (bytes == 0) {
            if (word != (uint32_t)checksum_of(start, total)) {
                broken(comm, "wrong data from rank %d on channel %d in step %u", t->peer, t->channel, flag - 1);
            }
            return true;
        }
        size_t n = bytes < 4 ? bytes : 4;
        memcpy(data, &word, n);
        data += n;
        bytes -= n;
    }
}

/* Credits for earlier kernels must have come back before the first step of this one. */
static bool may_send(struct kernel *k, struct transfer *t) {
    struct dev_conn *c = t->conn;
    uint64_t head = load(&send_mem_of(c->own)->head);
    if (head > c->step) {
        broken(k->comm, "rank %d gave credit for step %llu on channel %d, only %llu were sent", t->peer,
               (unsigned long long)head, t->channel, (unsigned long long)c->step);
    }
    bool *drained = &k->drained[t->channel][t->peer];
    if (!*drained && head != c->step) return false;
    *drained = true;
    return c->step - head < STEPS;
}

static bool send_step(struct kernel *k, struct transfer *t) {
    struct dev_conn *c = t->conn;
    if (!may_send(k, t)) return false;
    struct recv_mem *remote = recv_mem_of(c->remote);
    uint64_t step = c->step;
    size_t n = step_bytes(k->comm, t);
    uint8_t *data = t->data + t->done;
    if (t->proto == LL) {
        ll_write(ll_slot(c->remote, step), data, n, (uint32_t)(step + 1));
        c->step = step + 1;
        t->done += n;
        return true;
    }
    uint8_t *to = simple_slot(k->comm, c->remote, step);
    if (t->proto == DIRECT) {
        uint64_t *exchange = &send_mem_of(c->own)->ptr_exchange;
        uint64_t ptr = load(exchange);
        if (ptr == 0) return false;
        store(exchange, 0);
        check_access(k->comm->dev, ptr, n, 1);
        to = (uint8_t *)(uintptr_t)ptr;
    }
    memcpy(to, data, n);
    remote->slots[step % STEPS] =
        (struct slot_info){.step = step, .bytes = n, .checksum = checksum_of(data, n)};
    store(&remote->tail, step + 1);
    c->step = step + 1;
    t->done += n;
    return true;
}

static void post_credit(struct dev_conn *c) {
    store(&send_mem_of(c->remote)->head, c->step);
    c->posted = c->step;
}

static bool recv_step(struct kernel *k, struct transfer *t) {
    struct dev_conn *c = t->conn;
    uint64_t step = c->step;
    size_t n = step_bytes(k->comm, t);
    uint8_t ll_data[LL_DATA] __attribute__((aligned(8)));
    const uint8_t *from = ll_data;
    if (t->proto == LL) {
        if (!ll_read(k->comm, t, ll_slot(c->own, step), ll_data, n, (uint32_t)(step + 1))) return false;
    } else {
        struct recv_mem *own = recv_mem_of(c->own);
        uint64_t tail = load(&own->tail);
        if (tail > step + STEPS) {
            broken(k->comm, "tail %llu of rank %d on channel %d, at step %llu", (unsigned long long)tail, t->peer,
                   t->channel, (unsigned long long)step);
        }
        if (tail <= step) return false;
        struct slot_info info = own->slots[step % STEPS];
        from = t->proto == DIRECT ? t->data + t->done : simple_slot(k->comm, c->own, step);
        if (info.step != step || info.bytes != n || info.checksum != checksum_of(from, n)) {
            broken(k->comm, "wrong data from rank %d on channel %d in step %llu: slot of step %llu with %llu of %zu bytes",
                   t->peer, t->channel, (unsigned long long)step, (unsigned long long)info.step,
                   (unsigned long long)info.bytes, n);
        }
    }
    if (t->sum) {
        sum_into(t->data + t->done, from, n, t->dtype);
    } else if (t->proto != DIRECT) {
        memcpy(t->data + t->done, from, n);
    }
    c->step = step + 1;
    t->done += n;
    /* The last credits of a kernel come at its very end: half the slots are enough to go on meanwhile. */
    if (c->step - c->posted >= STEPS / 2) post_credit(c);
    return true;
}

static void open_transfer(struct kernel *k, struct transfer *t) {
    const struct dev_comm *comm = k->comm;
    struct dev_conn *c = t->conn;
    if (c->magic != mix((uint64_t)(t->channel * MAX_RANKS + t->peer) + (t->side == SENDER ? 1 : 1 << 20))) {
        broken(comm, "the connection to rank %d on channel %d has been lost", t->peer, t->channel);
    }
    size_t fifo = t->side == SENDER ? SIMPLE_OFFSET + comm->buffsize : CONTROL_BYTES;
    size_t own = t->side == SENDER ? (size_t)CONTROL_BYTES : SIMPLE_OFFSET + comm->buffsize;
    if (!c->on_host) {
        check_access(comm->dev, c->own, own, 1);
        check_access(comm->dev, c->remote, fifo, 1);
    }
    check_access(comm->dev, (uintptr_t)t->data, t->bytes, t->side == RECEIVER);
    if (t->side == RECEIVER) {
        k->received[t->channel][t->peer] = true;
        if (t->proto == DIRECT) store(&send_mem_of(c->remote)->ptr_exchange, t->remote);
    }
    t->open = true;
}

/* True when something moved. */
static bool advance(struct kernel *k, struct transfer *t) {
    if (t->before != NULL && !t->before->finished) return false;
    if (!t->open) open_transfer(k, t);
    bool moved = false;
    while (t->done < t->bytes && (t->side == SENDER ? send_step(k, t) : recv_step(k, t))) moved = true;
    if (t->done == t->bytes) {
        t->finished = true;
        moved = true;
    }
    return moved;
}

static void out_of_time(const struct kernel *k) {
    static const char *const protos[] = {"LL", "SIMPLE", "direct"};
    for (int i = 0; i < k->ntransfers; i++) {
        const struct transfer *t = &k->transfers[i];
        if (t->finished || !t->open) continue;
        const struct dev_conn *c = t->conn;
        unsigned long long step = c->step;
        if (t->side == SENDER) {
            broken(k->comm, "waited %u s for the credit of rank %d on channel %d (%s): step %llu, head %llu",
                   options.timeout_s, t->peer, t->channel, protos[t->proto], step,
                   (unsigned long long)load(&send_mem_of(c->own)->head));
        }
        broken(k->comm, "waited %u s for rank %d on channel %d (%s): step %llu, flag %llu, tail %llu", options.timeout_s,
               t->peer, t->channel, protos[t->proto], step,
               (unsigned long long)(load(ll_slot(c->own, step)) >> 32), (unsigned long long)load(&recv_mem_of(c->own)->tail));
    }
    broken(k->comm, "waited %u s for another rank", options.timeout_s);
}

/* Runs the transfers collected so far side by side. False: aborted. */
static bool run_transfers(struct kernel *k) {
    struct wait wait = {0};
    int left = k->ntransfers;
    while (left > 0) {
        bool moved = false;
        for (int i = 0; i < k->ntransfers; i++) {
            struct transfer *t = &k->transfers[i];
            if (t->finished) continue;
            if (advance(k, t)) moved = true;
            if (t->finished) left--;
        }
        if (moved) {
            wait.turns = 0;
            continue;
        }
        if (kernel_aborted(k->comm)) return false;
        if (!back_off(&wait)) out_of_time(k);
    }
    k->ntransfers = 0;
    return true;
}

/* ---- from operations to transfers ---- */

static struct dev_conn *conn_of(const struct dev_comm *comm, int side, int channel, int peer) {
    uint64_t array = side == SENDER ? comm->send[channel] : comm->recv[channel];
    return (struct dev_conn *)(uintptr_t)array + peer;
}

/* Room is made beforehand, since transfers point to each other. */
static void reserve_transfers(struct kernel *k, int n) {
    if (n <= k->capacity) return;
    k->transfers = realloc(k->transfers, sizeof *k->transfers * (size_t)n);
    if (k->transfers == NULL) broken(k->comm, "no host memory");
    k->capacity = n;
}

static void add_on_channel(struct kernel *k, int side, int peer, int channel, uint64_t data, size_t bytes, int proto,
                           int dtype, bool sum, uint64_t remote) {
    if (bytes == 0) return;
    struct transfer *t = &k->transfers[k->ntransfers];
    *t = (struct transfer){.conn = conn_of(k->comm, side, channel, peer),
                           .data = (uint8_t *)(uintptr_t)data,
                           .bytes = bytes,
                           .remote = remote,
                           .side = side,
                           .proto = proto,
                           .peer = peer,
                           .channel = channel,
                           .dtype = dtype,
                           .sum = sum};
    for (int i = k->ntransfers; i-- > 0 && t->before == NULL;) {
        if (k->transfers[i].conn == t->conn) t->before = &k->transfers[i];
    }
    k->ntransfers++;
}

/* Both ends divide by the same rule: small data on one channel by LL, other data over all channels. */
static void add(struct kernel *k, int side, int peer, uint64_t data, size_t count, int dtype, bool sum, bool direct,
                uint64_t remote) {
    size_t size = dtype_size(dtype), bytes = count * size;
    int channels = k->comm->channels, one = (k->comm->rank + peer) % channels;
    if (direct || bytes <= LL_MAX) {
        add_on_channel(k, side, peer, one, data, bytes, direct ? DIRECT : LL, dtype, sum, remote);
        return;
    }
    size_t part = (count + (size_t)channels - 1) / (size_t)channels;
    for (int c = 0; c < channels; c++) {
        size_t from = part * (size_t)c, n = from >= count ? 0 : count - from < part ? count - from : part;
        add_on_channel(k, side, peer, c, data + from * size, n * size, SIMPLE, dtype, sum, 0);
    }
}

static void copy_local(const struct dev_comm *comm, uint64_t dst, uint64_t src, size_t bytes) {
    if (dst == src || bytes == 0) return;
    check_access(comm->dev, src, bytes, 0);
    check_access(comm->dev, dst, bytes, 1);
    memmove((void *)(uintptr_t)dst, (const void *)(uintptr_t)src, bytes);
}

struct shard {
    size_t from, count;
};

static struct shard shard_of(const struct dev_comm *comm, size_t count, int rank) {
    size_t part = (count + (size_t)comm->nranks - 1) / (size_t)comm->nranks, from = part * (size_t)rank;
    if (from > count) from = count;
    return (struct shard){from, count - from < part ? count - from : part};
}

static bool all_reduce(struct kernel *k, const struct work *w) {
    const struct dev_comm *comm = k->comm;
    size_t size = dtype_size(w->dtype);
    struct shard own = shard_of(comm, w->count, comm->rank);
    copy_local(comm, w->recv + own.from * size, w->send + own.from * size, own.count * size);
    for (int i = 1; i < comm->nranks; i++) {
        int p = (comm->rank + i) % comm->nranks;
        struct shard s = shard_of(comm, w->count, p);
        add(k, SENDER, p, w->send + s.from * size, s.count, w->dtype, false, false, 0);
        add(k, RECEIVER, p, w->recv + own.from * size, own.count, w->dtype, true, false, 0);
    }
    if (!run_transfers(k)) return false;
    for (int i = 1; i < comm->nranks; i++) {
        int p = (comm->rank + i) % comm->nranks;
        struct shard s = shard_of(comm, w->count, p);
        add(k, SENDER, p, w->recv + own.from * size, own.count, w->dtype, false, false, 0);
        add(k, RECEIVER, p, w->recv + s.from * size, s.count, w->dtype, false, false, 0);
    }
    return run_transfers(k);
}

static bool reduce_scatter(struct kernel *k, const struct work *w) {
    const struct dev_comm *comm = k->comm;
    size_t bytes = w->count * dtype_size(w->dtype);
    uint64_t own = w->send + (size_t)comm->rank * bytes;
    copy_local(comm, w->recv, own, bytes);
    for (int i = 1; i < comm->nranks; i++) {
        int p = (comm->rank + i) % comm->nranks;
        add(k, SENDER, p, w->send + (size_t)p * bytes, w->count, w->dtype, false, false, 0);
        add(k, RECEIVER, p, w->recv, w->count, w->dtype, true, false, 0);
    }
    return run_transfers(k);
}

static bool all_gather(struct kernel *k, const struct work *w) {
    const struct dev_comm *comm = k->comm;
    size_t bytes = w->count * dtype_size(w->dtype);
    const uint64_t *remotes = (const uint64_t *)(uintptr_t)w->remote;
    if (w->direct) check_access(comm->dev, w->remote, sizeof *remotes * (size_t)comm->nranks, 0);
    copy_local(comm, w->recv + (size_t)comm->rank * bytes, w->send, bytes);
    for (int i = 1; i < comm->nranks; i++) {
        int p = (comm->rank + i) % comm->nranks;
        uint64_t at = w->direct ? remotes[p] + w->offset + (uint64_t)p * bytes : 0;
        add(k, SENDER, p, w->send, w->count, w->dtype, false, w->direct, 0);
        add(k, RECEIVER, p, w->recv + (size_t)p * bytes, w->count, w->dtype, false, w->direct, at);
    }
    return run_transfers(k);
}

static bool rooted(struct kernel *k, const struct work *w) {
    const struct dev_comm *comm = k->comm;
    bool reduce = w->kind == REDUCE;
    if (comm->rank != w->peer) {
        add(k, reduce ? SENDER : RECEIVER, w->peer, reduce ? w->send : w->recv, w->count, w->dtype, false, false, 0);
        return run_transfers(k);
    }
    copy_local(comm, w->recv, w->send, w->count * dtype_size(w->dtype));
    for (int i = 1; i < comm->nranks; i++) {
        int p = (comm->rank + i) % comm->nranks;
        add(k, reduce ? RECEIVER : SENDER, p, w->recv, w->count, w->dtype, reduce, false, 0);
    }
    return run_transfers(k);
}

static bool window_wait(const struct dev_comm *comm, const uint64_t *signals, uint64_t epoch) {
    for (int p = 0; p < comm->nranks; p++) {
        struct wait wait = {0};
        while (load(&signals[p]) < epoch) {
            if (kernel_aborted(comm)) return false;
            if (!back_off(&wait)) {
                broken(comm, "waited %u s for rank %d in a window: epoch %llu, signal %llu", options.timeout_s, p,
                       (unsigned long long)epoch, (unsigned long long)load(&signals[p]));
            }
        }
        if (load(&signals[p]) > epoch + 1) broken(comm, "the window's epoch has been lost");
    }
    return true;
}

/* Writes straight into the peers' windows; nobody starts before, or leaves before, all are there. */
static bool window_all_gather(struct kernel *k, const struct work *w) {
    const struct dev_comm *comm = k->comm;
    const struct dev_window_state *win = &comm->window;
    size_t bytes = w->count * dtype_size(w->dtype), at = (size_t)comm->rank * bytes;
    struct window_resource *own =
        (struct window_resource *)(uintptr_t)(win->flat + (uint64_t)comm->rank * win->stride + win->resource);
    check_access(comm->dev, (uintptr_t)own, sizeof *own, 1);
    uint64_t epoch = ++own->epoch;
    for (int i = 0; i < comm->nranks; i++) {
        int p = (comm->rank + i) % comm->nranks;
        uint64_t base = win->flat + (uint64_t)p * win->stride;
        check_access(comm->dev, base + win->resource, sizeof *own, 1);
        store(&((struct window_resource *)(uintptr_t)(base + win->resource))->enter[comm->rank], epoch);
    }
    if (!window_wait(comm, own->enter, epoch)) return false;
    for (int i = 0; i < comm->nranks; i++) {
        int p = (comm->rank + i) % comm->nranks;
        uint64_t base = win->flat + (uint64_t)p * win->stride;
        if (bytes > 0) {
            check_access(comm->dev, base + w->remote + at, bytes, 1);
            memmove((void *)(uintptr_t)(base + w->remote + at), (const void *)(uintptr_t)w->send, bytes);
        }
        store(&((struct window_resource *)(uintptr_t)(base + win->resource))->leave[comm->rank], epoch);
    }
    return window_wait(comm, own->leave, epoch);
}

/* ---- the kernels ---- */

static void check_bytes(const struct dev_comm *comm, uint64_t index) {
    const struct dev_checked *c = &comm->checked[index];
    check_access(comm->dev, c->ptr, c->bytes, 0);
    const uint64_t *words = (const uint64_t *)(uintptr_t)c->ptr;
    for (size_t i = 0; i < c->bytes / 8; i++) {
        uint64_t wanted = c->seed == 0 ? 0 : mix(c->seed ^ i);
        if (words[i] != wanted) {
            broken(comm, "metadata buffer %llu (%#llx, %llu bytes) differs at byte %zu: %#llx instead of %#llx",
                   (unsigned long long)index, (unsigned long long)c->ptr, (unsigned long long)c->bytes, i * 8,
                   (unsigned long long)words[i], (unsigned long long)wanted);
        }
    }
}

static struct dev_comm *enter(void **params) {
    const struct kernel_args *args = params[0];
    struct dev_comm *comm = (struct dev_comm *)(uintptr_t)args->dev_comm;
    check_access(args->dev, (uintptr_t)comm, sizeof *comm, 1);
    if (comm->checksum != checksum_of(comm, offsetof(struct dev_comm, checksum)) || comm->nchecked > MAX_CHECKED) {
        fprintf(stderr, "nccl stand-in: pid %d: the communicator's device state at %p has been lost\n", (int)getpid(),
                (void *)comm);
        abort();
    }
    if (comm->host_own != 0) {
        int prev = (comm->rank + comm->nranks - 1) % comm->nranks;
        ((uint64_t *)(uintptr_t)comm->host_own)[1]++;
        if (*(uint64_t *)(uintptr_t)comm->host_prev != mix((uint64_t)prev + 1)) {
            broken(comm, "the host buffer of rank %d has been lost", prev);
        }
    }
    comm->launches++;
    return comm;
}

/* The credits that the senders wait for with their next kernel. */
static void leave(struct kernel *k) {
    if (options.credit_delay_us > 0) usleep(options.credit_delay_us);
    for (int c = 0; c < k->comm->channels; c++) {
        for (int p = 0; p < k->comm->nranks; p++) {
            if (!k->received[c][p]) continue;
            struct dev_conn *conn = conn_of(k->comm, RECEIVER, c, p);
            if (conn->posted != conn->step) post_credit(conn);
        }
    }
    free(k->transfers);
}

static void collective_kernel(void **params) {
    struct dev_comm *comm = enter(params);
    uint32_t n = ((const struct kernel_args *)params[0])->n;
    const struct works *works = &((const struct kernel_args *)params[0])->works;
    struct kernel k = {.comm = comm};
    if (comm->nchecked > 0) check_bytes(comm, comm->launches % comm->nchecked);
    reserve_transfers(&k, 2 * comm->nranks * comm->channels);
    for (uint32_t i = 0; i < n; i++) {
        const struct work *w = &works->list[i];
        bool done = w->kind == ALL_REDUCE          ? all_reduce(&k, w)
                    : w->kind == REDUCE_SCATTER    ? reduce_scatter(&k, w)
                    : w->kind == ALL_GATHER        ? all_gather(&k, w)
                    : w->kind == WINDOW_ALL_GATHER ? window_all_gather(&k, w)
                                                   : rooted(&k, w);
        if (!done) {
            free(k.transfers);
            return;
        }
    }
    leave(&k);
}

static void p2p_kernel(void **params) {
    struct dev_comm *comm = enter(params);
    uint32_t n = ((const struct kernel_args *)params[0])->n, other = 0;
    const struct works *works = &((const struct kernel_args *)params[0])->works;
    struct kernel k = {.comm = comm};
    reserve_transfers(&k, (int)n * comm->channels);
    for (uint32_t i = 0; i < n; i++) {
        const struct work *w = &works->list[i];
        if (w->peer != comm->rank) {
            bool send = w->kind == SEND;
            add(&k, send ? SENDER : RECEIVER, w->peer, send ? w->send : w->recv, w->count, w->dtype, false, w->direct != 0,
                w->remote);
        } else if (w->kind == SEND) {
            /* The host sees to it that there are as many receives from the own rank. */
            while (works->list[other].kind != RECV || works->list[other].peer != comm->rank) other++;
            copy_local(comm, works->list[other++].recv, w->send, w->count * dtype_size(w->dtype));
        }
    }
    if (run_transfers(&k)) {
        leave(&k);
    } else {
        free(k.transfers);
    }
}

static void verify_kernel(void **params) {
    struct dev_comm *comm = enter(params);
    for (uint64_t i = 0; i < comm->nchecked; i++) check_bytes(comm, i);
}

ncclResult_t kernels_init(void) {
    const size_t size = sizeof(struct kernel_args);
    CU(cuSimFunctionCreate(&collective_function, collective_kernel, 1, &size));
    CU(cuSimFunctionCreate(&p2p_function, p2p_kernel, 1, &size));
    CU(cuSimFunctionCreate(&verify_function, verify_kernel, 1, &size));
    return ncclSuccess;
}
