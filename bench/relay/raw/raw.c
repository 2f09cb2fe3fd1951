// A relay that knows nothing of HTTP: one thread, epoll, read and write. What it
// costs is what any relay that copies through user space must at least pay; the
// figures of `make bench-relay` are ratios to it.
//
//	raw LISTEN_PORT ENGINE_PORT        both on 127.0.0.1; ends with SIGTERM
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

enum { MAX_FD = 65536, BUFFER = 64 << 10, EVENTS = 256 };

// Of each descriptor: its other side, and what that side was too slow to take.
struct side {
    int peer;  // 0: none
    char *rest;
    size_t size, sent;
};

static struct side sides[MAX_FD];
static char buffer[BUFFER];
static int poll_fd;

static void die(const char *what) {
    perror(what);
    exit(1);
}

static struct sockaddr_in local(const char *port) {
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(port))};
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return a;
}

static void watch(int op, int fd, uint32_t events) {
    struct epoll_event e = {.events = events, .data.fd = fd};
    if (epoll_ctl(poll_fd, op, fd, &e) != 0 && errno != ENOENT) die("epoll_ctl");
}

static void end(int fd) {
    int both[2] = {fd, sides[fd].peer};
    for (int i = 0; i < 2; i++) {
        free(sides[both[i]].rest);
        memset(&sides[both[i]], 0, sizeof(struct side));
        close(both[i]);
    }
}

static void accept_one(int listener, struct sockaddr_in *engine) {
    int one = 1, fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) return;
    int up = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    // On the loopback a connect does not wait for the peer.
    if (up < 0 || fd >= MAX_FD || up >= MAX_FD || connect(up, (struct sockaddr *)engine, sizeof *engine) != 0) {
        close(fd);
        if (up >= 0) close(up);
        return;
    }
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    setsockopt(up, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    sides[fd].peer = up;
    sides[up].peer = fd;
    watch(EPOLL_CTL_ADD, fd, EPOLLIN);
    watch(EPOLL_CTL_ADD, up, EPOLLIN);
}

// keep holds what `to` did not take; `from` is not read until it has.
static void keep(int from, int to, const char *p, size_t n) {
    struct side *s = &sides[to];
    s->rest = malloc(n);
    if (s->rest == NULL) die("malloc");
    memcpy(s->rest, p, n);
    s->size = n;
    s->sent = 0;
    watch(EPOLL_CTL_MOD, to, EPOLLIN | EPOLLOUT);
    watch(EPOLL_CTL_MOD, from, 0);
}

static void readable(int fd) {
    int to = sides[fd].peer;
    if (sides[to].rest != NULL) { // reported although not requested: it has closed
        end(fd);
        return;
    }
    ssize_t n = recv(fd, buffer, BUFFER, MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (n <= 0) {
        end(fd);
        return;
    }
    ssize_t w = send(to, buffer, (size_t)n, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (w < 0 && errno != EAGAIN && errno != EINTR) {
        end(fd);
    } else if (w < n) {
        keep(fd, to, buffer + (w > 0 ? w : 0), (size_t)(n - (w > 0 ? w : 0)));
    }
}

static void writable(int fd) {
    struct side *s = &sides[fd];
    ssize_t w = send(fd, s->rest + s->sent, s->size - s->sent, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (w < 0) {
        if (errno != EAGAIN && errno != EINTR) end(fd);
        return;
    }
    if ((s->sent += (size_t)w) < s->size) return;
    free(s->rest);
    s->rest = NULL;
    watch(EPOLL_CTL_MOD, fd, EPOLLIN);
    watch(EPOLL_CTL_MOD, s->peer, EPOLLIN);
}

int main(int argc, char **argv) {
    if (argc != 3) {
        fprintf(stderr, "usage: raw LISTEN_PORT ENGINE_PORT\n");
        return 2;
    }
    struct sockaddr_in here = local(argv[1]), engine = local(argv[2]);
    int one = 1, listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (listener < 0) die("socket");
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(listener, (struct sockaddr *)&here, sizeof here) != 0 || listen(listener, 4096) != 0) die("listen");
    if ((poll_fd = epoll_create1(EPOLL_CLOEXEC)) < 0) die("epoll_create1");
    watch(EPOLL_CTL_ADD, listener, EPOLLIN);
    struct epoll_event events[EVENTS];
    for (;;) {
        int n = epoll_wait(poll_fd, events, EVENTS, -1);
        for (int i = 0; i < n; i++) {
            int fd = events[i].data.fd;
            if (fd == listener) {
                accept_one(listener, &engine);
                continue;
            }
            // An earlier event of this batch may have ended it.
            if (sides[fd].peer != 0 && sides[fd].rest != NULL && (events[i].events & EPOLLOUT)) writable(fd);
            if (sides[fd].peer != 0 && (events[i].events & ~(uint32_t)EPOLLOUT)) readable(fd);
        }
    }
}
