// The least that a request can cost which is sent to two engines one after the other:
// one thread, epoll, no check of anything. The prompt is not scanned, not copied but by
// the kernel, and there is no choice, no retry, no deadline, no metric, no log. What the
// figures of `make bench-families` and of bench_sidecar.py have above it is the router's
// own; what they share with it is the kernel's.
//
//	legs LISTEN_PORT PREFILL_PORT DECODE_PORT     all on 127.0.0.1; ends with SIGTERM
//
// Prefill gets the client's body with kv_transfer_params behind it, decode the same with
// the handle of prefill's answer (vLLM's NixlConnector). With one engine for both, an
// engine that is asked for no handle gives none, and decode gets the body as it was. A
// request without a body goes to decode alone.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

enum { CLIENT, PREFILL, DECODE, SIDES };
enum { READING, PREFILLING, DECODING };
enum { EVENTS = 256, FIRST_ROOM = 16 << 10, MOST = 64 << 20, MOST_FD = 1 << 16 };

struct buffer {
    char *p;
    size_t n, room;
};

// One client with a connection of its own to either engine.
struct flow {
    int fd[SIDES], state;
    struct buffer request, answer; // answer: prefill's
    size_t body, length;           // of the request: where its body begins, how long it is
    char head[512];
    struct iovec out[6]; // to the engine of the state, what is left of it
    int outs;
    long left; // of decode's answer; -1: chunked, -2: its head has not come
};

// What a descriptor is: a side of a flow.
struct watched {
    struct flow *flow;
    int side;
};

static int poll_fd;
static struct watched sides[MOST_FD]; // by descriptor

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
    if (epoll_ctl(poll_fd, op, fd, &e) != 0) die("epoll_ctl");
}

static void end(struct flow *f) {
    for (int i = 0; i < SIDES; i++) {
        sides[f->fd[i]].flow = NULL;
        close(f->fd[i]);
    }
    free(f->request.p);
    free(f->answer.p);
    free(f);
}

static void accept_one(int listener, struct sockaddr_in *engines) {
    int one = 1;
    struct flow *f = calloc(1, sizeof *f);
    if (f == NULL) die("calloc");
    if ((f->fd[CLIENT] = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)) < 0) {
        free(f);
        return;
    }
    for (int i = PREFILL; i < SIDES; i++) {
        f->fd[i] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        // On the loopback a connect does not wait for the peer.
        if (f->fd[i] < 0 || connect(f->fd[i], (struct sockaddr *)&engines[i - PREFILL], sizeof *engines) != 0) die("connect");
    }
    for (int i = 0; i < SIDES; i++) {
        setsockopt(f->fd[i], IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        if (f->fd[i] >= MOST_FD) die("too many connections");
        sides[f->fd[i]] = (struct watched){f, i};
        watch(EPOLL_CTL_ADD, f->fd[i], EPOLLIN);
    }
}

// fill reads what there is; 0 where nothing is, -1 at an end.
static int fill(int fd, struct buffer *b) {
    if (b->n == b->room) {
        b->room = b->room == 0 ? FIRST_ROOM : 4 * b->room;
        if (b->room > MOST || (b->p = realloc(b->p, b->room)) == NULL) die("too long a message");
    }
    ssize_t n = recv(fd, b->p + b->n, b->room - b->n, MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return 0;
    if (n <= 0) return -1;
    b->n += (size_t)n;
    return 1;
}

// headed says whether a head has come: where its body begins, and the body's length,
// which is -1 where it is chunked.
static int headed(const char *p, size_t n, size_t *body, long *length) {
    const char *end = memmem(p, n, "\r\n\r\n", 4);
    if (end == NULL) return 0;
    *body = (size_t)(end + 4 - p);
    *length = 0;
    for (const char *line = p; line < end; line = (char *)memchr(line, '\n', (size_t)(end + 4 - line)) + 1) {
        if (strncasecmp(line, "content-length:", 15) == 0) *length = atol(line + 15);
        if (strncasecmp(line, "transfer-encoding:", 18) == 0) *length = -1;
    }
    return 1;
}

static void push(struct flow *f, const void *p, size_t n) {
    if (n > 0) f->out[f->outs++] = (struct iovec){(void *)p, n};
}

// flush sends what is left, and has epoll say when more can be.
static void flush(struct flow *f, int side) {
    int from = 0;
    while (from < f->outs) {
        struct msghdr m = {.msg_iov = f->out + from, .msg_iovlen = (size_t)(f->outs - from)};
        ssize_t n = sendmsg(f->fd[side], &m, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && errno == EAGAIN) {
            memmove(f->out, f->out + from, (size_t)(f->outs - from) * sizeof f->out[0]);
            f->outs -= from;
            watch(EPOLL_CTL_MOD, f->fd[side], EPOLLIN | EPOLLOUT);
            return;
        }
        if (n < 0) die("sendmsg");
        for (size_t sent = (size_t)n; from < f->outs && sent > 0;) {
            size_t take = sent < f->out[from].iov_len ? sent : f->out[from].iov_len;
            f->out[from].iov_base = (char *)f->out[from].iov_base + take;
            f->out[from].iov_len -= take;
            sent -= take;
            if (f->out[from].iov_len == 0) from++;
        }
    }
    f->outs = 0;
}

static const char ask[] = ",\"kv_transfer_params\":{\"do_remote_decode\":true,\"do_remote_prefill\":false,\"remote_engine_id\":null,"
                          "\"remote_block_ids\":null,\"remote_host\":null,\"remote_port\":null}}";
static const char member[] = "\"kv_transfer_params\":";

// send_leg sends the client's body with `more` in the place of its last brace.
static void send_leg(struct flow *f, int side, const char *key, size_t keys, const char *value, size_t values) {
    const char *p = f->request.p, *line = memchr(p, '\n', f->request.n);
    size_t length = f->length - 1 + keys + values + (values > 0);
    int n = snprintf(f->head, sizeof f->head, "%.*sHost: x\r\nContent-Type: application/json\r\nContent-Length: %zu\r\n\r\n", (int)(line + 1 - p), p, length);
    if (n < 0 || (size_t)n >= sizeof f->head) die("too long a path");
    f->outs = 0;
    push(f, f->head, (size_t)n);
    push(f, p + f->body, f->length - 1);
    push(f, key, keys);
    push(f, value, values);
    if (values > 0) push(f, "}", 1);
    flush(f, side);
}

// swap writes `to` over `from` near the body's beginning, where loads have it.
static void swap(struct flow *f, const char *from, const char *to) {
    size_t near = f->length < 256 ? f->length : 256;
    char *at = memmem(f->request.p + f->body, near, from, strlen(from));
    if (at != NULL) memcpy(at, to, strlen(to));
}

static void decode(struct flow *f) {
    f->state = DECODING;
    f->left = -2;
    swap(f, "\"stream\":null", "\"stream\":true");
    swap(f, "\"stream_ignored\"", "\"stream_options\"");
    char *at = memmem(f->answer.p, f->answer.n, member, sizeof member - 1), *last = f->answer.p + f->answer.n;
    if (at == NULL || at[sizeof member - 1] != '{') {
        send_leg(f, DECODE, "}", 1, NULL, 0);
        return;
    }
    char *from = at + sizeof member - 1, *to = from;
    for (int depth = 0, quoted = 0; to < last; to++) {
        if (*to == '"') quoted = !quoted;
        if (!quoted && *to == '{') depth++;
        if (!quoted && *to == '}' && --depth == 0) break;
    }
    static const char key[] = ",\"kv_transfer_params\":";
    send_leg(f, DECODE, key, sizeof key - 1, from, (size_t)(to + 1 - from));
}

static void from_client(struct flow *f) {
    int got = fill(f->fd[CLIENT], &f->request);
    if (got < 0) {
        end(f);
        return;
    }
    long length;
    if (got == 0 || f->state != READING || (f->length == 0 && !headed(f->request.p, f->request.n, &f->body, &length))) return;
    if (f->length == 0) f->length = (size_t)length;
    if (f->request.n < f->body + f->length) return;
    if (f->length == 0) {
        f->state = DECODING;
        f->left = -2;
        f->outs = 0;
        push(f, f->request.p, f->request.n);
        flush(f, DECODE);
        return;
    }
    f->state = PREFILLING;
    f->answer.n = 0;
    swap(f, "\"stream\":true", "\"stream\":null");
    swap(f, "\"stream_options\"", "\"stream_ignored\"");
    send_leg(f, PREFILL, ask, sizeof ask - 1, NULL, 0);
}

static void from_prefill(struct flow *f) {
    int got = fill(f->fd[PREFILL], &f->answer);
    size_t body;
    long length;
    if (got < 0 || f->state != PREFILLING) {
        end(f);
        return;
    }
    if (got > 0 && headed(f->answer.p, f->answer.n, &body, &length) && f->answer.n >= body + (size_t)length) decode(f);
}

static void from_decode(struct flow *f) {
    static char p[64 << 10];
    ssize_t n = recv(f->fd[DECODE], p, sizeof p, MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (n <= 0 || f->state != DECODING || send(f->fd[CLIENT], p, (size_t)n, MSG_DONTWAIT | MSG_NOSIGNAL) != n) {
        end(f);
        return;
    }
    size_t body = 0;
    if (f->left == -2) {
        if (!headed(p, (size_t)n, &body, &f->left)) die("decode's head came in pieces");
        if (f->left >= 0) f->left += (long)body;
    }
    if (f->left >= 0) f->left -= n;
    if (f->left == 0 || (f->left == -1 && n >= 5 && memcmp(p + n - 5, "0\r\n\r\n", 5) == 0)) {
        f->state = READING;
        f->request.n = f->length = 0;
    }
}

int main(int argc, char **argv) {
    if (argc != 4) {
        fprintf(stderr, "usage: legs LISTEN_PORT PREFILL_PORT DECODE_PORT\n");
        return 2;
    }
    struct sockaddr_in here = local(argv[1]), engines[2] = {local(argv[2]), local(argv[3])};
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
                accept_one(listener, engines);
                continue;
            }
            struct flow *f = sides[fd].flow;
            if (f == NULL) continue; // an earlier event of this batch has ended it
            int side = sides[fd].side;
            if (events[i].events & EPOLLOUT) {
                watch(EPOLL_CTL_MOD, fd, EPOLLIN);
                flush(f, side);
                if (!(events[i].events & ~(uint32_t)EPOLLOUT)) continue;
            }
            (side == CLIENT ? from_client : side == PREFILL ? from_prefill : from_decode)(f);
        }
    }
}
