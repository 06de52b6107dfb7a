/*
 * Ranks find each other by abstract Unix sockets whose names come from the
 * unique id. Each communicator has a thread, named as NCCL's, that reads all
 * that others send: data for its own threads, and requests to export a handle,
 * to allocate a buffer, to map a registered one.
 */
#include "internal.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { MAX_CLIENTS = 4 * MAX_RANKS };

struct packet {
    struct request request;
    unsigned char payload[MAX_PAYLOAD];
};

double now_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static socklen_t name_of(const struct ncclComm *comm, int rank, struct sockaddr_un *addr) {
    memset(addr, 0, sizeof *addr);
    addr->sun_family = AF_UNIX;
    int n = snprintf(addr->sun_path + 1, sizeof addr->sun_path - 1, "nccl-standin-%016llx%016llx-%d",
                     (unsigned long long)comm->id[0], (unsigned long long)comm->id[1], rank);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n);
}

/* One packet, with fd unless it is -1. */
static bool send_packet(int sock, const void *data, size_t len, int fd) {
    struct iovec iov = {.iov_base = (void *)(uintptr_t)data, .iov_len = len};
    union {
        struct cmsghdr align;
        char space[CMSG_SPACE(sizeof(int))];
    } control;
    struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1};
    if (fd >= 0) {
        memset(&control, 0, sizeof control);
        msg.msg_control = control.space;
        msg.msg_controllen = sizeof control.space;
        struct cmsghdr *c = CMSG_FIRSTHDR(&msg);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(c), &fd, sizeof fd);
    }
    ssize_t n;
    do {
        n = sendmsg(sock, &msg, MSG_NOSIGNAL);
    } while (n < 0 && errno == EINTR);
    return n == (ssize_t)len;
}

/* The length of the packet; 0 at the end of the connection; -1 on an error. */
static ssize_t recv_packet(int sock, void *data, size_t size, int *fd) {
    struct iovec iov = {.iov_base = data, .iov_len = size};
    union {
        struct cmsghdr align;
        char space[CMSG_SPACE(sizeof(int))];
    } control;
    struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = control.space,
                         .msg_controllen = sizeof control.space};
    ssize_t n;
    do {
        n = recvmsg(sock, &msg, MSG_CMSG_CLOEXEC);
    } while (n < 0 && errno == EINTR);
    *fd = -1;
    if (n > 0) {
        for (struct cmsghdr *c = CMSG_FIRSTHDR(&msg); c != NULL; c = CMSG_NXTHDR(&msg, c)) {
            if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS) memcpy(fd, CMSG_DATA(c), sizeof *fd);
        }
    }
    return n;
}

/* ---- the proxy thread ---- */

static void deliver(struct ncclComm *comm, const struct packet *packet) {
    struct message *m = malloc(sizeof *m + packet->request.len);
    if (m == NULL) abort();
    m->next = NULL;
    m->from = packet->request.from;
    m->tag = packet->request.tag;
    m->len = packet->request.len;
    memcpy(m->data, packet->payload, m->len);
    pthread_mutex_lock(&comm->lock);
    struct message **end = &comm->mailbox;
    while (*end != NULL) end = &(*end)->next;
    *end = m;
    pthread_cond_broadcast(&comm->arrived);
    pthread_mutex_unlock(&comm->lock);
}

static ncclResult_t export_fd(struct ncclComm *comm, uint64_t handle, int *fd) {
    (void)comm;
    if (!options.cumem) {
        *fd = dup((int)handle);
        return *fd >= 0 ? ncclSuccess : fail(ncclSystemError, "dup of a memory file: %s", strerror(errno));
    }
    CU(cuMemExportToShareableHandle(fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    return ncclSuccess;
}

static bool serve(struct ncclComm *comm, int client) {
    struct packet packet;
    struct reply reply = {0};
    int fd_in = -1, fd_out = -1;
    ssize_t n = recv_packet(client, &packet, sizeof packet, &fd_in);
    if (n < (ssize_t)sizeof packet.request || packet.request.len > sizeof packet.payload ||
        (size_t)n != sizeof packet.request + packet.request.len) {
        if (fd_in >= 0) close(fd_in);
        return false;
    }
    const struct request *r = &packet.request;
    switch (r->kind) {
    case REQUEST_DATA:
        deliver(comm, &packet);
        return true;
    case REQUEST_GET_FD:
        reply.result = (int32_t)export_fd(comm, r->a, &fd_out);
        break;
    case REQUEST_SETUP:
        reply.result = (int32_t)proxy_setup(comm, r->a, (int)r->b, false, &reply);
        break;
    case REQUEST_HOST_SETUP:
        reply.result = (int32_t)proxy_setup(comm, r->a, 0, true, &reply);
        break;
    case REQUEST_NET:
        reply.result = (int32_t)proxy_net_setup(comm, (int)r->a, &reply);
        break;
    case REQUEST_REGISTER:
        reply.result = (int32_t)proxy_register(comm, r->a, r->b, fd_in, &reply);
        fd_in = -1;
        break;
    case REQUEST_DEREGISTER:
        reply.result = (int32_t)proxy_deregister(comm, r->a);
        break;
    default:
        reply.result = ncclInternalError;
    }
    if (fd_in >= 0) close(fd_in);
    bool sent = send_packet(client, &reply, sizeof reply, fd_out);
    if (fd_out >= 0) close(fd_out);
    return sent;
}

static void *proxy_main(void *arg) {
    struct ncclComm *comm = arg;
    struct pollfd fds[2 + MAX_CLIENTS];
    nfds_t n = 2;
    driver.cuCtxSetCurrent(comm->ctx);
    fds[0] = (struct pollfd){.fd = comm->stop_fd, .events = POLLIN};
    fds[1] = (struct pollfd){.fd = comm->listen_fd, .events = POLLIN};
    for (;;) {
        if (poll(fds, n, -1) < 0 && errno != EINTR) break;
        if (fds[0].revents != 0) break;
        for (nfds_t i = n; i-- > 2;) {
            if (fds[i].revents == 0 || serve(comm, fds[i].fd)) continue;
            close(fds[i].fd);
            fds[i] = fds[--n];
        }
        if (fds[1].revents & POLLIN) {
            int client = accept4(comm->listen_fd, NULL, NULL, SOCK_CLOEXEC);
            if (client >= 0 && n < 2 + MAX_CLIENTS) {
                fds[n++] = (struct pollfd){.fd = client, .events = POLLIN};
            } else if (client >= 0) {
                close(client);
            }
        }
    }
    for (nfds_t i = 2; i < n; i++) close(fds[i].fd);
    proxy_free_all(comm);
    return NULL;
}

/* ---- the communicator's own threads ---- */

ncclResult_t bootstrap_start(struct ncclComm *comm) {
    struct sockaddr_un addr;
    socklen_t len = name_of(comm, comm->rank, &addr);
    comm->stop_fd = eventfd(0, EFD_CLOEXEC);
    comm->listen_fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (comm->stop_fd < 0 || comm->listen_fd < 0) return fail(ncclSystemError, "socket: %s", strerror(errno));
    if (bind(comm->listen_fd, (struct sockaddr *)&addr, len) != 0 || listen(comm->listen_fd, MAX_CLIENTS) != 0) {
        return fail(ncclSystemError, "rank %d: its socket: %s (is the rank used twice?)", comm->rank, strerror(errno));
    }
    if (pthread_create(&comm->proxy, NULL, proxy_main, comm) != 0) return fail(ncclSystemError, "no proxy thread");
    comm->proxy_started = true;
    pthread_setname_np(comm->proxy, "NCCL Service");
    return ncclSuccess;
}

void bootstrap_stop(struct ncclComm *comm) {
    if (comm->proxy_started) {
        uint64_t one = 1;
        if (write(comm->stop_fd, &one, sizeof one) == sizeof one) pthread_join(comm->proxy, NULL);
        comm->proxy_started = false;
    }
    for (int i = 0; i < comm->nranks; i++) {
        if (comm->sockets[i] >= 0) close(comm->sockets[i]);
        comm->sockets[i] = -1;
    }
    if (comm->listen_fd >= 0) close(comm->listen_fd);
    if (comm->stop_fd >= 0) close(comm->stop_fd);
    comm->listen_fd = comm->stop_fd = -1;
    while (comm->mailbox != NULL) {
        struct message *m = comm->mailbox;
        comm->mailbox = m->next;
        free(m);
    }
}

static bool aborted(const struct ncclComm *comm) {
    return comm->abort_flag != NULL && __atomic_load_n(comm->abort_flag, __ATOMIC_ACQUIRE) != 0;
}

/* A peer may not have come as far as its socket yet. */
static ncclResult_t socket_to(struct ncclComm *comm, int peer, int *sock) {
    if (comm->sockets[peer] >= 0) {
        *sock = comm->sockets[peer];
        return ncclSuccess;
    }
    struct sockaddr_un addr;
    socklen_t len = name_of(comm, peer, &addr);
    double deadline = now_seconds() + options.timeout_s;
    int s = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (s < 0) return fail(ncclSystemError, "socket: %s", strerror(errno));
    while (connect(s, (struct sockaddr *)&addr, len) != 0) {
        if ((errno != ECONNREFUSED && errno != EINTR && errno != EAGAIN) || now_seconds() > deadline || aborted(comm)) {
            int error = errno;
            close(s);
            return fail(ncclSystemError, "rank %d can't reach rank %d: %s", comm->rank, peer, strerror(error));
        }
        usleep(2000);
    }
    struct timeval limit = {.tv_sec = (time_t)options.timeout_s};
    setsockopt(s, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    comm->sockets[peer] = *sock = s;
    return ncclSuccess;
}

ncclResult_t bootstrap_send(struct ncclComm *comm, int peer, uint32_t tag, const void *data, size_t len) {
    struct packet packet;
    int sock;
    if (len > sizeof packet.payload) return fail(ncclInternalError, "a message of %zu bytes is too long", len);
    TRY(socket_to(comm, peer, &sock));
    packet.request = (struct request){.kind = REQUEST_DATA, .from = comm->rank, .tag = tag, .len = (uint32_t)len};
    memcpy(packet.payload, data, len);
    if (!send_packet(sock, &packet, sizeof packet.request + len, -1)) {
        return fail(ncclRemoteError, "rank %d: send to rank %d: %s", comm->rank, peer, strerror(errno));
    }
    return ncclSuccess;
}

static struct message *take(struct ncclComm *comm, int peer, uint32_t tag) {
    for (struct message **m = &comm->mailbox; *m != NULL; m = &(*m)->next) {
        if ((*m)->from == peer && (*m)->tag == tag) {
            struct message *found = *m;
            *m = found->next;
            return found;
        }
    }
    return NULL;
}

ncclResult_t bootstrap_recv(struct ncclComm *comm, int peer, uint32_t tag, void *data, size_t len) {
    double deadline = now_seconds() + options.timeout_s;
    struct message *m;
    pthread_mutex_lock(&comm->lock);
    while ((m = take(comm, peer, tag)) == NULL && now_seconds() < deadline && !aborted(comm)) {
        struct timespec slice;
        clock_gettime(CLOCK_MONOTONIC, &slice);
        slice.tv_nsec += 200 * 1000 * 1000;
        slice.tv_sec += slice.tv_nsec / 1000000000;
        slice.tv_nsec %= 1000000000;
        pthread_cond_timedwait(&comm->arrived, &comm->lock, &slice);
    }
    pthread_mutex_unlock(&comm->lock);
    if (m == NULL) {
        return fail(ncclRemoteError, "rank %d: no message %#x from rank %d within %u s", comm->rank, tag, peer,
                    options.timeout_s);
    }
    bool fits = m->len == len;
    if (fits) memcpy(data, m->data, len);
    free(m);
    return fits ? ncclSuccess : fail(ncclInternalError, "message %#x of rank %d has another length", tag, peer);
}

ncclResult_t bootstrap_all_gather(struct ncclComm *comm, void *all, size_t size) {
    uint32_t tag = comm->sequence++;
    unsigned char *elements = all;
    for (int i = 1; i < comm->nranks; i++) {
        int peer = (comm->rank + i) % comm->nranks;
        TRY(bootstrap_send(comm, peer, tag, elements + size * (size_t)comm->rank, size));
    }
    for (int i = 1; i < comm->nranks; i++) {
        int peer = (comm->rank + i) % comm->nranks;
        TRY(bootstrap_recv(comm, peer, tag, elements + size * (size_t)peer, size));
    }
    return ncclSuccess;
}

ncclResult_t bootstrap_barrier(struct ncclComm *comm) {
    unsigned char all[MAX_RANKS] = {0};
    return bootstrap_all_gather(comm, all, 1);
}

ncclResult_t proxy_call(struct ncclComm *comm, int rank, struct request *request, int fd_in, struct reply *reply,
                        int *fd_out) {
    int sock, fd = -1;
    TRY(socket_to(comm, rank, &sock));
    request->from = comm->rank;
    request->len = 0;
    if (!send_packet(sock, request, sizeof *request, fd_in)) {
        return fail(ncclRemoteError, "request %u to rank %d: %s", request->kind, rank, strerror(errno));
    }
    ssize_t n = recv_packet(sock, reply, sizeof *reply, &fd);
    if (n != (ssize_t)sizeof *reply) {
        if (fd >= 0) close(fd);
        return fail(ncclRemoteError, "request %u to rank %d: %s", request->kind, rank,
                    n == 0 ? "its communicator is gone" : strerror(errno));
    }
    if (fd_out != NULL) {
        *fd_out = fd;
    } else if (fd >= 0) {
        close(fd);
    }
    if (reply->result != ncclSuccess) {
        return rank == comm->rank ? (ncclResult_t)reply->result
                                  : fail((ncclResult_t)reply->result, "request %u failed at rank %d", request->kind, rank);
    }
    return ncclSuccess;
}

ncclResult_t proxy_get_fd(struct ncclComm *comm, int rank, uint64_t handle, int *fd) {
    struct request request = {.kind = REQUEST_GET_FD, .a = handle};
    struct reply reply;
    TRY(proxy_call(comm, rank, &request, -1, &reply, fd));
    return *fd >= 0 ? ncclSuccess : fail(ncclInternalError, "rank %d answered without an fd", rank);
}
