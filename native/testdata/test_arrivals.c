/* The thread beside a library that has descriptors: true ones, ones that are always ready,
 * ones that never are. What is looked at are its passes, which a slow machine makes fewer of. */
#include "harness.h"

static struct sluice_slot e;
static char buf[1024];

static uint64_t passes(struct rig *r) { return __atomic_load_n(&r->shared->beats, __ATOMIC_RELAXED); }

static struct rig other; /* of an agent that sends, so that only a descriptor tells the one that gets */

/* Begins agent "a" without a progress thread of the library's; the handle by which the other knows it. */
static uint64_t start(struct rig *r, int how) {
  *r = rig_new(64, 64);
  uint64_t args[3] = {0, 0, 0};
  fake.set("arrivals", how, 1);
  CHECK(rig_start(r) == 0 && call(r, SLUICE_OP_CREATE, 0, args, "a", 2, &e, buf, sizeof buf) == 0 &&
            call(r, SLUICE_OP_BACKEND, 0, NULL, "UCX", 4, &e, buf, sizeof buf) == 0,
        "start");
  CHECK(call(&other, SLUICE_OP_LOAD, 0, NULL, "a", 1, &e, buf, sizeof buf) == 0, "peer");
  return e.handle;
}

/* n notifications, each after a rest; all must come. */
static void notify(struct rig *r, uint64_t to, int n) {
  for (int i = 0; i < n; i++) {
    usleep(3000);
    CHECK(push(&other, SLUICE_OP_NOTIFY, 0, to, NULL, &i, sizeof i), "push");
    CHECK(pull(r, &e, buf, sizeof buf, 20) && e.op == SLUICE_EV_NOTIF && memcmp(buf + e.aux, &i, sizeof i) == 0, "notification %d", i);
  }
}

/* Whether there is a stretch of 200 ms, within so many seconds, with passes from least to most. */
static int seen_within(struct rig *r, uint64_t least, uint64_t most, double seconds) {
  for (double end = now_s() + seconds; now_s() < end;) {
    uint64_t before = passes(r);
    usleep(200000);
    uint64_t n = passes(r) - before;
    if (n >= least && n <= most) {
      return 1;
    }
  }
  return 0;
}

static int seen(struct rig *r, uint64_t least, uint64_t most) { return seen_within(r, least, most, 30); }

/* Whether looks become rare behind notifications. One that comes just when a look's time is
 * over anyhow has told of nothing, and looks go at their pace again: some more, then. */
static int trusted(struct rig *r, uint64_t to) {
  for (int i = 0; i < 20; i++) {
    notify(r, to, 40);
    if (seen_within(r, 1, 300, 1)) {
      return 1;
    }
  }
  return 0;
}

/* The epoll descriptors of the process. */
static int epolls(void) {
  int n = 0;
  for (int fd = 0; fd < 256; fd++) {
    char path[64], target[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    ssize_t len = readlink(path, target, sizeof target - 1);
    n += len == 22 && memcmp(target, "anon_inode:[eventpoll]", 22) == 0;
  }
  return n;
}

static void expect(struct rig *r, uint64_t n) { __atomic_store_n(&r->shared->outstanding, n, __ATOMIC_SEQ_CST); }

int main(int argc, char **argv) {
  load_fake(argc > 1 ? argv[1] : ".");
  other = rig_new(64, 64);
  CHECK(rig_start(&other) == 0 && begin(&other, "b") == 0, "the other");

  struct rig r;
  int before = epolls();
  uint64_t to = start(&r, FAKE_ARRIVALS);
  CHECK(epolls() == before + 3, "the library's, a stranger's, and a copy of the library's: %d", epolls() - before);
  CHECK(seen(&r, 1, 100), "idle, it dozes");
  notify(&r, to, 5);
  expect(&r, 1);
  CHECK(trusted(&r, to), "what is told of need not be looked for");
  notify(&r, to, 5);
  expect(&r, 0);
  rig_stop(&r);
  CHECK(epolls() == before, "none is left: %d", epolls() - before);

  /* Descriptors that say nothing, as of a transport that has none. */
  to = start(&r, FAKE_NEVER);
  expect(&r, 1);
  notify(&r, to, 40);
  CHECK(seen(&r, 400, 1 << 30), "it goes on looking at the pace");
  expect(&r, 0);
  rig_stop(&r);

  /* One that is always ready is left in the end, and what comes is found all the same. */
  to = start(&r, FAKE_ALWAYS);
  CHECK(seen(&r, 1, 250), "it is not spun on for ever");
  notify(&r, to, 5);
  rig_stop(&r);

  /* None at all. */
  to = start(&r, FAKE_NORMAL);
  CHECK(seen(&r, 50, 300), "with nobody else to make progress it looks every millisecond");
  notify(&r, to, 5);
  rig_stop(&r);
  rig_stop(&other);
  return done();
}
