// Engine and load for what a KB of a prompt costs a proxy (scripts/bench_prompts.py). Both
// take next to no time of their own, so that the proxy between them is never idle: the
// simulated engine and `sluice load` need several times what a proxy does for a prompt of
// 16,384 ids, and a proxy that waits most of the time pays more for whatever it is asked.
//
//	prompts engine PORT                        answers every request once its body has come
//	prompts load PORT CONNECTIONS IDS SECONDS  prints how many requests were answered, the
//	                                           bytes of one, head included, and the p50 and
//	                                           p99 of their times in µs
//	prompts text PORT CONNECTIONS BYTES SECONDS  likewise, with prompts of text; the engine's
//	                                           /tokenize tells an id for each four bytes
//	prompts new PORT CONNECTIONS BYTES SECONDS   likewise, each new from its first byte
//	prompts same PORT CONNECTIONS BYTES SECONDS  likewise, one text for each connection
//
// Both on 127.0.0.1, one thread each. With "load" and "text" a connection sends the same
// prompt again and again, of which the second half is another each time: a digit more in its
// middle is enough, for blocks are hashed with all that is before them. No two runs send the
// same prompts, so a proxy has seen none of a run's in the run before.
#define _GNU_SOURCE
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { EVENTS = 64, MOST_FD = 1 << 16, HEAD = 8 << 10, PIECE = 1 << 20, CHANGED = 12, CHANGED_DIGITS = 5 };

static int poll_fd;
static char piece[PIECE];

static void die(const char *what) {
    perror(what);
    exit(1);
}

// say_all sends all of p, since sockets block here; 0 where the other end has gone.
static int say_all(int fd, const char *p, size_t n) { return send(fd, p, n, MSG_NOSIGNAL) == (ssize_t)n; }

static void watch(int fd) {
    int on = 1;
    struct epoll_event e = {.events = EPOLLIN, .data.fd = fd};
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    if (fd >= MOST_FD || epoll_ctl(poll_fd, EPOLL_CTL_ADD, fd, &e) < 0)
        die("epoll_ctl");
}

static struct sockaddr_in at(const char *port) {
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(atoi(port)), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    return a;
}

static unsigned random_below(unsigned n) {
    static unsigned long s;
    if (s == 0) {
        struct timespec t;
        clock_gettime(CLOCK_REALTIME, &t);
        s = 88172645463325252ul ^ t.tv_nsec ^ (unsigned long)t.tv_sec << 30 ^ (unsigned long)getpid() << 12;
    }
    s ^= s << 13, s ^= s >> 7, s ^= s << 17;
    return (s >> 16) % n;
}

// What the engine has of a request: the beginning of its head, then how much of its body is to come.
static struct {
    char head[HEAD];
    int n;
    long left;
    long tokenize; // bytes of a request to /tokenize, else 0
} asked[MOST_FD];

// tokens answers /tokenize with as many ids as a body of so many bytes may be.
static void tokens(int fd, long bytes) {
    static char out[8 << 20];
    long count = bytes / 4;
    if (count * 7 + 4096 > (long)sizeof out)
        count = (sizeof out - 4096) / 7;
    char *body = out + 256, *p = body + sprintf(body, "{\"count\":%ld,\"max_model_len\":131072,\"tokens\":[", count);
    static char ids[65536][8]; // of a vocabulary of 128,000, written once
    if (!ids[0][0])
        for (int i = 0; i < 65536; i++)
            sprintf(ids[i], "%d,", 1000 + random_below(127000));
    for (long i = 0; i < count; i++) {
        const char *id = ids[i & 65535];
        while (*id)
            *p++ = *id++;
    }
    p += sprintf(p - 1, "],\"token_strs\":null}") - 1;
    int head = sprintf(out, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %ld\r\n\r\n", (long)(p - body));
    memmove(body - head, out, head);
    say_all(fd, body - head, head + (p - body));
}

static void answer(int fd, int models) {
    static const char *completion =
        "{\"id\":\"cmpl-1\",\"object\":\"text_completion\",\"created\":1,\"model\":\"sim\",\"choices\":[{\"index\":0,\"text\":\" a b c d\","
        "\"logprobs\":null,\"finish_reason\":\"length\"}],\"usage\":{\"prompt_tokens\":64,\"completion_tokens\":4,\"total_tokens\":68}}";
    static const char *list = "{\"object\":\"list\",\"data\":[{\"id\":\"sim\",\"object\":\"model\"}]}";
    const char *body = models ? list : completion;
    char out[1024];
    int n = snprintf(out, sizeof out, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %zu\r\n\r\n%s", strlen(body), body);
    say_all(fd, out, n);
}

// taken goes through n bytes of a connection; -1 for a head that is too long.
static int taken(int fd, const char *p, long n) {
    while (n > 0) {
        if (asked[fd].left > 0) {
            long part = n < asked[fd].left ? n : asked[fd].left;
            p += part, n -= part;
            if ((asked[fd].left -= part) == 0) {
                if (asked[fd].tokenize)
                    tokens(fd, asked[fd].tokenize);
                else
                    answer(fd, 0);
            }
            continue;
        }
        int had = asked[fd].n, part = n < HEAD - 1 - had ? n : HEAD - 1 - had;
        memcpy(asked[fd].head + had, p, part);
        asked[fd].head[had + part] = 0;
        char *end = strstr(asked[fd].head, "\r\n\r\n");
        if (!end) {
            if ((asked[fd].n += part) == HEAD - 1)
                return -1;
            p += part, n -= part;
            continue;
        }
        part = end + 4 - asked[fd].head - had;
        p += part, n -= part;
        end[2] = 0;
        char *length = strcasestr(asked[fd].head, "\r\nContent-Length:");
        asked[fd].n = 0, asked[fd].tokenize = 0;
        if ((asked[fd].left = length ? atol(strchr(length, ':') + 1) : 0) == 0)
            answer(fd, strstr(asked[fd].head, " /v1/models ") != NULL);
        else if (strstr(asked[fd].head, " /tokenize "))
            asked[fd].tokenize = asked[fd].left;
    }
    return 0;
}

static void engine(const char *port) {
    int on = 1, l = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in a = at(port);
    setsockopt(l, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(l, (struct sockaddr *)&a, sizeof a) < 0 || listen(l, 512) < 0)
        die("listen");
    watch(l);
    for (struct epoll_event ev[EVENTS];;) {
        int n = epoll_wait(poll_fd, ev, EVENTS, -1);
        for (int i = 0; i < n; i++) {
            int fd = ev[i].data.fd;
            if (fd == l) {
                if ((fd = accept(l, NULL, NULL)) < 0)
                    die("accept");
                memset(&asked[fd], 0, sizeof asked[fd]);
                watch(fd);
                continue;
            }
            long got = recv(fd, piece, sizeof piece, MSG_DONTWAIT);
            if (got <= 0 || taken(fd, piece, got) < 0)
                close(fd);
        }
    }
}

// What changes from one request of a connection to the next.
enum kind { IDS, TEXT, NEW, SAME };

static struct {
    char *request;
    int n, change; // where what changes stands
    double sent;
} sends[MOST_FD];

// The times of the answers in µs, as many as there is space for.
static struct {
    float at[1 << 21];
    int n;
} times;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}

// prompt makes the request of a connection, of ids as they are in a vocabulary of 128,000, or
// of so many bytes of text.
static void prompt(int fd, int ids, enum kind kind) {
    int text = kind != IDS;
    char *body = malloc(ids * 8 + 256), *p = body + sprintf(body, "{\"model\":\"sim\",\"prompt\":%c", text ? '"' : '[');
    int change = 0;
    for (int i = 0; i < ids && text; i++) {
        *p++ = i % 6 == 5 ? ' ' : 'a' + random_below(26);
        if (i == (kind == NEW ? CHANGED - 1 : ids / 2))
            change = p - body - CHANGED;
    }
    for (int i = 0; i < ids && !text; i++) {
        if (i > 0)
            *p++ = ',';
        if (i == ids / 2)
            change = p - body;
        p += sprintf(p, "%d", i == ids / 2 ? 111111 : 1000 + random_below(127000));
    }
    p += sprintf(p, "%c,\"max_tokens\":4,\"temperature\":0}", text ? '"' : ']');
    char *r = sends[fd].request = malloc(p - body + 256);
    int head = sprintf(r, "POST /v1/completions HTTP/1.1\r\nHost: engine\r\nContent-Type: application/json\r\nContent-Length: %ld\r\n\r\n", (long)(p - body));
    memcpy(r + head, body, p - body);
    sends[fd].n = head + (p - body), sends[fd].change = head + change;
    free(body);
}

static void ask(int fd, enum kind kind) {
    for (int i = 0; i < CHANGED_DIGITS && kind == IDS; i++)
        sends[fd].request[sends[fd].change + i] = '1' + random_below(9);
    for (int i = 0; i < CHANGED && (kind == TEXT || kind == NEW); i++)
        sends[fd].request[sends[fd].change + i] = 'a' + random_below(26);
    sends[fd].sent = now();
    if (!say_all(fd, sends[fd].request, sends[fd].n))
        die("send");
}

static int by_size(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

// ends reports whether n bytes end an answer: with its object, or with the last chunk of it. Some proxies
// send the head alone first.
static int ends(const char *p, long n) {
    const char *body = memcmp(p, "HTTP/1.1 ", n < 9 ? n : 9) == 0 ? memmem(p, n, "\r\n\r\n", 4) : NULL;
    if (body && body + 4 == p + n)
        return 0;
    return p[n - 1] == '}' || (n >= 5 && memcmp(p + n - 5, "0\r\n\r\n", 5) == 0);
}

static void load(const char *port, int connections, int ids, double seconds, enum kind kind) {
    struct sockaddr_in a = at(port);
    int one = 0;
    for (int i = 0; i < connections; i++) {
        int fd = socket(AF_INET, SOCK_STREAM, 0);
        if (fd < 0 || connect(fd, (struct sockaddr *)&a, sizeof a) < 0)
            die("connect");
        watch(fd);
        prompt(fd, ids, kind);
        ask(fd, kind);
        one = sends[fd].n;
    }
    long answered = 0;
    // On a busy machine none may be served in so short a time.
    for (double end = now() + seconds; now() < end || (answered == 0 && now() < end + 10);) {
        struct epoll_event ev[EVENTS];
        int n = epoll_wait(poll_fd, ev, EVENTS, 100);
        for (int i = 0; i < n; i++) {
            int fd = ev[i].data.fd;
            long got = recv(fd, piece, sizeof piece, MSG_DONTWAIT);
            if (got <= 0 || (memcmp(piece, "HTTP/1.1 ", 9) == 0 && memcmp(piece + 9, "200", 3) != 0)) {
                fprintf(stderr, "no answer: %.*s\n", (int)(got < 0 ? 0 : got > 300 ? 300 : got), piece);
                exit(1);
            }
            if (!ends(piece, got))
                continue;
            answered++;
            if (times.n < (int)(sizeof times.at / sizeof *times.at))
                times.at[times.n++] = (now() - sends[fd].sent) * 1e6;
            ask(fd, kind);
        }
    }
    qsort(times.at, times.n, sizeof *times.at, by_size);
    printf("%ld %d %.0f %.0f\n", answered, one, times.at[times.n / 2], times.at[times.n * 99L / 100]);
}

int main(int argc, char **argv) {
    poll_fd = epoll_create1(0);
    if (argc == 3 && strcmp(argv[1], "engine") == 0)
        engine(argv[2]);
    static const char *kinds[] = {[IDS] = "load", [TEXT] = "text", [NEW] = "new", [SAME] = "same"};
    for (int kind = IDS; argc == 6 && kind <= SAME; kind++)
        if (strcmp(argv[1], kinds[kind]) == 0) {
            load(argv[2], atoi(argv[3]), atoi(argv[4]), atof(argv[5]), kind);
            return 0;
        }
    fprintf(stderr, "prompts engine PORT | prompts load PORT CONNECTIONS IDS SECONDS | prompts text|new|same PORT CONNECTIONS BYTES SECONDS\n");
    return 2;
}
