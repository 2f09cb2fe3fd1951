// Engine and client of scripts/bench_relay.py --overload: many streams of small events,
// paced or as fast as the engine can send. Both are in C so that they need less CPU than
// the proxy between them, and the proxy stays busy where that is what is measured.
//
//	overload engine PORT
//	overload load PORT STREAMS EVENTS_PER_SECOND SECONDS
//
// Both use 127.0.0.1 and have one thread each. The engine answers each POST by a stream of
// chunked events, one chunk and one send for each event, that ends when the client
// disconnects. The first event comes at once. When all streams have begun, the engine sends
// to them in turn: EVENTS_PER_SECOND to each, or without a pause if that is 0. The load prints "measuring" when all streams have begun and have run
// for half a second, and SECONDS later one line of JSON:
//
//	events    events that the client received
//	writes    TCP segments with data that the client received. Over the loopback device a
//	          write of up to 64 KiB is one segment, so this is the proxy's number of writes.
//	p50_us, p99_us  from the engine's send of an event to the client's read of it
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum {
    EVENTS = 1024,
    MAX_FD = 1 << 16,
    BUFFER = 64 << 10,
    STAMP = 16,                   // hexadecimal digits of a send's time in ns
    SAMPLES = 4 << 20,
    SEND_BUFFER = 32 << 10,       // bounds the kernel's memory where the proxy is slower than the engine
    WARM_UP_MS = 500,
    BEGIN_TIMEOUT_MS = 30000,
    CLIENT_PAUSE_NS = 20000000,   // between two reads of an unpaced run: the client shares the engine's core
};

// MARK occurs once in each event, before the stamp.
#define MARK '~'

static const char event_head[] = "data: {\"id\":\"cmpl-~0123456789abcdef\",\"object\":\"text_completion\",\"created\":1700000000,\"model\":\"sim\","
                                 "\"choices\":[{\"index\":0,\"text\":\" token\",\"logprobs\":null,\"finish_reason\":null}]}\n\n";

static int poll_fd;
static char buffer[BUFFER + 1];

static void die(const char *what) {
    perror(what);
    exit(1);
}

static uint64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void pause_ns(long ns) {
    struct timespec t = {.tv_nsec = ns};
    nanosleep(&t, NULL);
}

static struct sockaddr_in local(const char *port) {
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(port)), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    return a;
}

static void watch(int fd) {
    int one = 1;
    struct epoll_event e = {.events = EPOLLIN, .data.fd = fd};
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (fd >= MAX_FD || epoll_ctl(poll_fd, EPOLL_CTL_ADD, fd, &e) != 0) die("epoll_ctl");
}

// ---- engine

// Of each connection: the request that has arrived so far. A request fits the buffer.
static struct request {
    char *text;
    int size;
} requests[MAX_FD];

static struct stream {
    int fd;
    uint64_t interval, due; // ns; interval 0: unpaced
} streams[MAX_FD];
static int stream_count, streams_wanted;

static char event[sizeof event_head + 16]; // with its chunk framing
static int event_size, stamp_at;

static void make_event(void) {
    event_size = sprintf(event, "%zx\r\n%s\r\n", strlen(event_head), event_head);
    stamp_at = (int)(strchr(event, MARK) - event) + 1;
}

static void stamp(uint64_t t) {
    for (int i = STAMP - 1; i >= 0; i--, t >>= 4) event[stamp_at + i] = "0123456789abcdef"[t & 15];
}

static void end_connection(int fd) {
    for (int i = 0; i < stream_count; i++) {
        if (streams[i].fd == fd) streams[i] = streams[--stream_count];
    }
    free(requests[fd].text);
    memset(&requests[fd], 0, sizeof requests[fd]);
    close(fd);
}

static void respond(int fd, const char *body) {
    char out[512];
    int n = snprintf(out, sizeof out, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %zu\r\n\r\n%s", strlen(body), body);
    if (send(fd, out, (size_t)n, MSG_NOSIGNAL | MSG_DONTWAIT) != n) end_connection(fd);
}

static void begin_stream(int fd, const char *body) {
    static const char head[] = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n";
    const char *prompt = strstr(body, "\"prompt\":["); // carries the events per second and the number of streams
    long rate = 0;
    if (prompt == NULL || sscanf(prompt, "\"prompt\":[%ld,%d]", &rate, &streams_wanted) != 2 ||
        send(fd, head, sizeof head - 1, MSG_NOSIGNAL | MSG_DONTWAIT) != (ssize_t)sizeof head - 1 ||
        send(fd, event, (size_t)event_size, MSG_NOSIGNAL | MSG_DONTWAIT) != event_size) {
        end_connection(fd);
        return;
    }
    uint64_t interval = rate > 0 ? 1000000000u / (uint64_t)rate : 0;
    // The streams' phases are spread evenly by the golden ratio.
    streams[stream_count] = (struct stream){.fd = fd, .interval = interval, .due = now() + (uint64_t)((double)interval * ((stream_count * 0.6180339887) - (int)(stream_count * 0.6180339887)))};
    stream_count++;
}

// received handles what has arrived on a connection. Only one request is open at a time.
static void received(int fd, const char *p, int n) {
    struct request *r = &requests[fd];
    if ((r->text = realloc(r->text, (size_t)(r->size + n + 1))) == NULL) die("realloc");
    memcpy(r->text + r->size, p, (size_t)n);
    r->size += n;
    r->text[r->size] = 0;
    char *body = strstr(r->text, "\r\n\r\n");
    if (body == NULL) return;
    char *length = strcasestr(r->text, "\r\nContent-Length:");
    int want = length != NULL && length < body ? atoi(strchr(length, ':') + 1) : 0;
    body += 4;
    if (r->text + r->size - body < want) return;
    r->size = 0;
    if (strncmp(r->text, "POST ", 5) == 0) begin_stream(fd, body);
    else respond(fd, "{\"object\":\"list\",\"data\":[{\"id\":\"sim\",\"object\":\"model\"}]}");
}

// send_due sends each stream at most one event. It returns when the next is due, 0 if at once.
static uint64_t send_due(void) {
    uint64_t t = now(), next = t + 1000000;
    for (int i = 0; i < stream_count; i++) {
        struct stream *s = &streams[i];
        if (s->due > t) {
            if (s->due < next) next = s->due;
            continue;
        }
        if ((i & 15) == 0) t = now();
        stamp(t);
        // An event for which there is no space is sent in a later turn; one that has been sent in
        // part would break the framing, and the rest of it is waited for.
        ssize_t n = send(s->fd, event, (size_t)event_size, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n < 0 && errno == EAGAIN) {
            s->due = t + 1000000;
            continue;
        }
        for (ssize_t more; n >= 0 && n < event_size; n += more) {
            if ((more = send(s->fd, event + n, (size_t)(event_size - n), MSG_NOSIGNAL)) < 0) break;
        }
        if (n < event_size) {
            end_connection(s->fd);
            i--; // the last stream has taken its place
            continue;
        }
        s->due = s->interval > 0 ? s->due + s->interval : t;
        if (s->due < next) next = s->due;
    }
    return next <= now() ? 0 : next;
}

static void engine(const char *port) {
    int one = 1, size = SEND_BUFFER, listener = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in a = local(port);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    setsockopt(listener, SOL_SOCKET, SO_SNDBUF, &size, sizeof size);
    if (bind(listener, (struct sockaddr *)&a, sizeof a) != 0 || listen(listener, 4096) != 0) die("listen");
    watch(listener);
    make_event();
    for (struct epoll_event ev[EVENTS];;) {
        int timeout = -1;
        // Before all streams have begun, the proxy has CPU for the others' requests.
        if (stream_count > 0 && stream_count >= streams_wanted) {
            streams_wanted = 0; // from now on streams only end
            uint64_t next = send_due(), t = now();
            if (next > t) pause_ns((long)(next - t));
            timeout = 0;
        }
        int n = epoll_wait(poll_fd, ev, EVENTS, timeout);
        for (int i = 0; i < n; i++) {
            int fd = ev[i].data.fd;
            if (fd == listener) {
                if ((fd = accept(listener, NULL, NULL)) < 0) die("accept");
                watch(fd);
                continue;
            }
            ssize_t got = recv(fd, buffer, BUFFER, MSG_DONTWAIT);
            if (got > 0) received(fd, buffer, (int)got);
            else if (got == 0 || errno != EAGAIN) end_connection(fd);
        }
    }
}

// ---- client

static uint32_t samples[SAMPLES]; // latencies in ns
static size_t sample_count;
static int begun[MAX_FD];

static int by_value(const void *a, const void *b) {
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return x < y ? -1 : x > y;
}

static double percentile(double q) {
    return sample_count == 0 ? 0 : samples[(size_t)(q * (double)(sample_count - 1))] / 1e3;
}

// count returns how many events p has, and samples their latency.
static long count(const char *p, ssize_t n, int measuring) {
    const char *end = p + n;
    long events = 0;
    uint64_t t = measuring ? now() : 0;
    for (; (p = memchr(p, MARK, (size_t)(end - p))) != NULL; events++) {
        p++;
        if (!measuring || end - p < STAMP || sample_count == SAMPLES) continue;
        uint64_t sent = 0;
        for (int i = 0; i < STAMP; i++) sent = sent << 4 | (uint64_t)(p[i] <= '9' ? p[i] - '0' : p[i] - 'a' + 10);
        if (t - sent < 1u << 31) samples[sample_count++] = (uint32_t)(t - sent);
    }
    return events;
}

static long segments(const int *fds, int n) {
    long sum = 0;
    for (int i = 0; i < n; i++) {
        struct tcp_info info = {0};
        socklen_t size = sizeof info;
        if (getsockopt(fds[i], IPPROTO_TCP, TCP_INFO, &info, &size) != 0) die("TCP_INFO");
        sum += info.tcpi_data_segs_in;
    }
    return sum;
}

static void load(const char *port, int n, int rate, double seconds) {
    char body[256], request[512];
    struct sockaddr_in a = local(port);
    int size = sprintf(body, "{\"model\":\"sim\",\"prompt\":[%d,%d],\"max_tokens\":100000,\"stream\":true}", rate, n);
    size = sprintf(request, "POST /v1/completions HTTP/1.1\r\nHost: engine\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", size, body);
    int *fds = calloc((size_t)n, sizeof *fds), waiting = n;
    if (fds == NULL) die("calloc");
    for (int i = 0; i < n; i++) {
        if ((fds[i] = socket(AF_INET, SOCK_STREAM, 0)) < 0 || connect(fds[i], (struct sockaddr *)&a, sizeof a) != 0) die("connect");
        watch(fds[i]);
        if (send(fds[i], request, (size_t)size, MSG_NOSIGNAL) != size) die("send");
    }
    uint64_t begin_by = now() + (uint64_t)BEGIN_TIMEOUT_MS * 1000000u, from = 0, until = 0;
    long events = 0, writes = 0;
    for (struct epoll_event ev[EVENTS];;) {
        uint64_t t = now();
        if (until == 0 && t > begin_by) {
            fprintf(stderr, "%d of %d streams have not begun\n", waiting, n);
            exit(1);
        }
        if (from != 0 && until == 0 && t >= from) {
            puts("measuring");
            fflush(stdout);
            until = now() + (uint64_t)(seconds * 1e9);
            events = 0, sample_count = 0, writes = segments(fds, n);
        }
        if (until != 0 && t >= until) break;
        if (rate == 0) pause_ns(CLIENT_PAUSE_NS);
        int got = epoll_wait(poll_fd, ev, EVENTS, rate == 0 ? 0 : 10);
        for (int i = 0; i < got; i++) {
            int fd = ev[i].data.fd;
            ssize_t r = recv(fd, buffer, BUFFER, MSG_DONTWAIT);
            if (r < 0 && errno == EAGAIN) continue;
            if (r <= 0 || (!begun[fd] && strncmp(buffer, "HTTP/1.1 200", 12) != 0)) {
                fprintf(stderr, "a stream has ended: %.*s\n", (int)(r < 0 ? 0 : r > 300 ? 300 : r), buffer);
                exit(1);
            }
            long e = count(buffer, r, until != 0);
            events += e;
            if (begun[fd] == 0) begun[fd] = 1;
            if (begun[fd] == 1 && e > 0) {
                begun[fd] = 2;
                if (--waiting == 0) from = now() + (uint64_t)WARM_UP_MS * 1000000u;
            }
        }
    }
    writes = segments(fds, n) - writes;
    qsort(samples, sample_count, sizeof *samples, by_value);
    printf("{\"events\":%ld,\"writes\":%ld,\"p50_us\":%.0f,\"p99_us\":%.0f}\n", events, writes, percentile(0.5), percentile(0.99));
    fflush(stdout);
}

int main(int argc, char **argv) {
    struct rlimit files = {0};
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0);
    if ((poll_fd = epoll_create1(EPOLL_CLOEXEC)) < 0) die("epoll_create1");
    if (argc == 3 && strcmp(argv[1], "engine") == 0) engine(argv[2]);
    if (argc != 6 || strcmp(argv[1], "load") != 0) {
        fprintf(stderr, "usage: overload engine PORT | overload load PORT STREAMS EVENTS_PER_SECOND SECONDS\n");
        return 2;
    }
    load(argv[2], atoi(argv[3]), atoi(argv[4]), atof(argv[5]));
}
