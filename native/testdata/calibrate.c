/* The time that this machine needs to wake a sleeping thread, one wake-up a millisecond, with
 * nothing of ours in it: the floor under every tier's figure.
 *
 *   calibrate threads COUNT   one thread wakes another by an eventfd; prints the figures
 *   calibrate socket COUNT    one process another by a UNIX socket; likewise
 *   calibrate send COUNT      sends the time (CLOCK_REALTIME, ns, 8 bytes) over descriptor 3
 *
 * Figures: p50 and p99 in ns, and the share of a core of the one that is woken in percent. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static int64_t now(clockid_t c) {
  struct timespec t;
  clock_gettime(c, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static long count;
static int from_fd, to_fd;
static int64_t sent; /* by the eventfd, whose own number is no place for it */

/* Sends one a millisecond; 0 when all went. */
static int sends(int event) {
  prctl(PR_SET_TIMERSLACK, 1000, 0, 0, 0);
  int64_t next = now(CLOCK_MONOTONIC);
  for (long i = 0; i < count; i++) {
    int64_t t = now(CLOCK_REALTIME), one = 1;
    __atomic_store_n(&sent, t, __ATOMIC_SEQ_CST);
    if (write(to_fd, event ? &one : &t, 8) != 8) {
      return 1;
    }
    next += 1000000;
    int64_t left = next - now(CLOCK_MONOTONIC);
    if (left > 0) {
      nanosleep(&(struct timespec){0, (long)left}, NULL);
    }
  }
  return 0;
}

static int by_time(const void *a, const void *b) {
  int64_t d = *(const int64_t *)a - *(const int64_t *)b;
  return d < 0 ? -1 : d > 0;
}

static void *receives(void *event) {
  int64_t *took = calloc((size_t)count, sizeof *took), t;
  int64_t began = now(CLOCK_MONOTONIC), cpu = now(CLOCK_THREAD_CPUTIME_ID);
  for (long i = 0; i < count; i++) {
    if (read(from_fd, &t, 8) != 8) {
      exit(1);
    }
    took[i] = now(CLOCK_REALTIME) - (event != NULL ? __atomic_load_n(&sent, __ATOMIC_SEQ_CST) : t);
    for (long more = event != NULL ? (long)t - 1 : 0; more > 0 && i + 1 < count; more--, i++) {
      took[i + 1] = took[i]; /* several at once: the last one's time */
    }
  }
  cpu = now(CLOCK_THREAD_CPUTIME_ID) - cpu;
  began = now(CLOCK_MONOTONIC) - began;
  qsort(took, (size_t)count, sizeof *took, by_time);
  printf("%lld %lld %.2f\n", (long long)took[count / 2], (long long)took[count * 99 / 100], 100.0 * (double)cpu / (double)began);
  return NULL;
}

int main(int argc, char **argv) {
  if (argc != 3 || (count = atol(argv[2])) < 1) {
    return 2;
  }
  if (strcmp(argv[1], "send") == 0) {
    to_fd = 3;
    return sends(0);
  }
  if (strcmp(argv[1], "threads") == 0) {
    from_fd = to_fd = eventfd(0, 0);
    pthread_t reader;
    if (from_fd < 0 || pthread_create(&reader, NULL, receives, &count) != 0 || sends(1) != 0) {
      return 1;
    }
    return pthread_join(reader, NULL);
  }
  int pair[2];
  if (strcmp(argv[1], "socket") != 0 || socketpair(AF_UNIX, SOCK_STREAM, 0, pair) != 0) {
    return 1;
  }
  from_fd = pair[0], to_fd = pair[1];
  pid_t child = fork();
  if (child == 0) {
    _exit(sends(0));
  }
  receives(NULL);
  return waitpid(child, NULL, 0) == child ? 0 : 1;
}
