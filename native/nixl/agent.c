/* The thread that owns a NIXL agent. It executes commands, and polls transfers,
 * notifications and boards: when a descriptor of UCX becomes readable (arrivals.c), and
 * periodically, because NIXL has no descriptor that signals everything. */
#define _GNU_SOURCE
#include "nixl/agent.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

static void relax(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ __volatile__("yield");
#endif
}

/* The longest wait on the library's descriptors while something is outstanding, and the
 * longest sleep if there are none and only this thread makes the library's progress. */
#define MAX_WAIT_NS 1000000u
/* After SPURIOUS_BACKOFF wake-ups in a row by a descriptor without any finding, the thread polls
 * at its interval again; after SPURIOUS_MAX it no longer waits on the descriptors. */
#define SPURIOUS_BACKOFF 64u
#define SPURIOUS_MAX 20000u

/* Waits for ns, for one of the library's descriptors, or for fd if it is not negative. */
static void wait_for(struct agent *a, int fd, uint64_t ns) {
  struct pollfd p[MAX_ARRIVALS + 1];
  nfds_t n = 0;
  struct timespec t = {(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)};
  if (a->spurious >= SPURIOUS_BACKOFF) {
    nanosleep(&(struct timespec){0, (long)(a->poll.busy_ns % 1000000000u)}, NULL);
  }
  for (; n < a->arrival_count; n++) {
    p[n] = (struct pollfd){a->arrivals[n], POLLIN, 0};
  }
  if (fd >= 0) {
    p[n++] = (struct pollfd){fd, POLLIN, 0};
  }
  int ready = ppoll(p, n, &t, NULL);
  a->woken = ready == 0 ? WOKEN_BY_TIME : WOKEN;
  if (ready > 0 && fd >= 0 && p[n - 1].revents != 0) {
    uint64_t count;
    ssize_t ignored = read(fd, &count, sizeof count);
    (void)ignored;
    ready--;
  }
  if (ready <= 0) {
    a->spurious = 0;
    return;
  }
  a->woken = WOKEN_BY_ARRIVAL;
  if (++a->spurious > SPURIOUS_MAX) {
    arrivals_release(a);
    a->spurious = 0;
  }
}

/* Adapts the wait after something was found. If the descriptors signal arrivals, polling
 * is unnecessary and the wait grows; if time ended the wait, as on a transport without
 * descriptors, the thread polls at its interval. */
static void learn(struct agent *a) {
  a->spurious = 0;
  if (a->woken == WOKEN_BY_TIME) {
    a->max_wait = a->poll.busy_ns;
  } else if (a->woken == WOKEN_BY_ARRIVAL && a->max_wait < MAX_WAIT_NS) {
    a->max_wait *= 2;
  }
}

/* Sleeps until a command or an arrival, at most for ns; if nothing is outstanding, also
 * until something is. */
static void sleep_until_work(struct agent *a, uint64_t ns, int outstanding) {
  __atomic_store_n(&a->rings.shared->asleep, 1, __ATOMIC_SEQ_CST);
  int work = rings_command_waits(&a->rings) ||
             (!outstanding && __atomic_load_n(&a->rings.shared->outstanding, __ATOMIC_SEQ_CST) != 0);
  if (!work) {
    wait_for(a, a->wake_fd, ns);
  }
  __atomic_store_n(&a->rings.shared->asleep, 0, __ATOMIC_SEQ_CST);
}

/* Sleeps while something is outstanding. A short sleep does not wait for commands: a
 * command is found at most busy_ns later, and its producer makes no system call. */
static void sleep_briefly(struct agent *a) {
  if (a->arrival_count > 0 && a->max_wait > a->poll.busy_ns) {
    sleep_until_work(a, a->max_wait, 1);
  } else {
    wait_for(a, -1, a->poll.busy_ns);
  }
}

static int commands_run(struct agent *a) {
  int n = 0;
  /* A command causes at most two events (its answer, a peer that went down). A command
   * whose events do not fit is not started. */
  for (; n < 64 && !a->rings.stopping; n++) {
    if (rings_free_events(&a->rings) < 2) {
      break;
    }
    struct sluice_slot *c = rings_next_command(&a->rings);
    if (c == NULL) {
      break;
    }
    if (n > 0) {
      a->rings.now = rings_clock();
    }
    agent_execute(a, c);
    rings_command_done(&a->rings, c);
  }
  return n;
}

static void *agent_main(void *p) {
  struct agent *a = p;
  prctl(PR_SET_NAME, "sluice-nixl", 0, 0, 0);
  prctl(PR_SET_TIMERSLACK, 1000, 0, 0, 0); /* otherwise each sleep is 50 us longer */
  uint64_t last = rings_clock(), idle = a->poll.busy_ns;
  while (!a->rings.stopping) {
    a->rings.now = rings_clock();
    __atomic_store_n(&a->rings.shared->beats, a->rings.shared->beats + 1, __ATOMIC_RELAXED);
    int did = commands_run(a);
    if (a->nixl != NULL && !a->rings.stopping) {
      int found = transfers_poll(a) + notifs_poll(a) + boards_sweep(a);
      if (found > 0) {
        learn(a);
      }
      did += found;
    }
    a->woken = WOKEN;
    rings_wake_reader(&a->rings);
    if (did > 0) {
      last = a->rings.now;
      idle = a->poll.busy_ns;
      continue;
    }
    if (a->live > 0 || __atomic_load_n(&a->rings.shared->outstanding, __ATOMIC_RELAXED) > 0) {
      idle = a->poll.busy_ns;
      if (a->live > 0 && a->rings.now - last < a->poll.spin_ns) { /* a transfer is often this short */
        relax();
      } else {
        sleep_briefly(a);
      }
      continue;
    }
    uint64_t most = a->own_progress && a->arrival_count == 0 && a->poll.idle_ns > MAX_WAIT_NS ? MAX_WAIT_NS : a->poll.idle_ns;
    sleep_until_work(a, idle, 0);
    idle = idle * 2 > most ? most : idle * 2;
  }
  struct sluice_shared *shared = a->rings.shared;
  int event_fd = a->rings.event_fd;
  arrivals_release(a);
  free(a);
  uint64_t one = 1;
  ssize_t ignored = write(event_fd, &one, sizeof one);
  (void)ignored;
  /* The last access to memory that the caller owns. */
  __atomic_store_n(&shared->gone, 1, __ATOMIC_SEQ_CST);
  return NULL;
}

/* Starts a detached thread with all signals blocked, because the threads that the library
 * starts from it inherit the mask. Returns 0 or an errno. */
static int start_thread(void *(*run)(void *), void *argument) {
  sigset_t all, old;
  pthread_attr_t attr;
  pthread_t t;
  sigfillset(&all);
  int e = pthread_attr_init(&attr);
  if (e != 0) {
    return e;
  }
  pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
  pthread_attr_setstacksize(&attr, 8u << 20);
  pthread_sigmask(SIG_SETMASK, &all, &old);
  e = pthread_create(&t, &attr, run, argument);
  pthread_sigmask(SIG_SETMASK, &old, NULL);
  pthread_attr_destroy(&attr);
  return e;
}

int sluice_agent_start(struct sluice_shared *shared, uint32_t cmd_capacity, uint32_t evt_capacity, uint32_t spill, int wake_fd, int event_fd,
                       const struct sluice_poll_intervals *poll) {
  if (shared == NULL || poll == NULL || !rings_capacities_valid(cmd_capacity, evt_capacity) || wake_fd < 0 || event_fd < 0) {
    return EINVAL;
  }
  const struct nixl_api *api = sluice_nixl_api();
  if (api == NULL) {
    return ENOENT;
  }
  struct agent *a = calloc(1, sizeof *a);
  if (a == NULL) {
    return ENOMEM;
  }
  a->poll = *poll;
  a->max_wait = poll->busy_ns;
  a->api = api;
  a->wake_fd = wake_fd;
  rings_init(&a->rings, shared, cmd_capacity, evt_capacity, spill, event_fd);

  int e = start_thread(agent_main, a);
  if (e != 0) {
    free(a);
  }
  return e;
}
