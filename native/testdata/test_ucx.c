/* The worker of active messages over a libucp of ours: every status of every call,
 * sends that end later, a slow reader, peers that die, a library that hangs. */
#include "harness.h"
#include "ucx/api.h"

#include <poll.h>
#include <pthread.h>

#define LATER 12345

static struct sluice_slot e;
static char buf[70000];
static const int statuses[] = {-1, -3, -5, -25, -80, 1, 77};

static int expected(int s) { return s > 0 ? SLUICE_GARBAGE : SLUICE_UCX_ERROR + s; }

struct worker {
  void *ucx;
  int wake;
  pthread_t thread;
};

/* Does as Go does, from one thread: waits for a command or a message between steps. */
static void *run(void *p) {
  struct worker *w = p;
  for (int next; (next = sluice_ucx_step(w->ucx)) != SLUICE_UCX_STOPPED;) {
    if (next == SLUICE_UCX_NAP) {
      usleep(200);
    } else if (next == SLUICE_UCX_WAIT) {
      struct pollfd f[2] = {{w->wake, POLLIN, 0}, {sluice_ucx_fd(w->ucx), POLLIN, 0}};
      uint64_t n;
      if (poll(f, 2, 1000) > 0 && f[0].revents != 0 && read(w->wake, &n, sizeof n) < 0) {
        abort();
      }
    }
  }
  return NULL;
}

static void start(struct rig *r, struct worker *w) {
  w->wake = r->wake;
  w->ucx = sluice_ucx_new(r->shared, r->ncommands, r->nevents, r->spill, r->event);
  CHECK(w->ucx != NULL, "a worker");
  pthread_create(&w->thread, NULL, run, w);
}

static void stop(struct rig *r, struct worker *w) {
  CHECK(call(r, SLUICE_OP_STOP, 0, NULL, NULL, 0, &e, buf, sizeof buf) == 0, "stop");
  pthread_join(w->thread, NULL);
  CHECK(r->shared->gone == 1, "it is gone");
  for (uint64_t at = r->shared->evt_head; at != r->shared->evt_tail; at++) { /* what was not read */
    struct sluice_slot *s = &r->events[at & (r->nevents - 1)];
    if (s->big != 0 && r->spill == 0) {
      sluice_free((void *)(uintptr_t)s->big);
    }
  }
  close(r->wake);
  close(r->event);
  free(r->shared);
}

static int open_named(struct rig *r, const char *name) {
  int s = call(r, SLUICE_OP_CREATE, 0, NULL, name, strlen(name) + 1, &e, buf, sizeof buf);
  return s != 0 ? s : call(r, SLUICE_OP_BACKEND, 0, NULL, "UCX\0TLS\0tcp", 12, &e, buf, sizeof buf);
}

static uint64_t meet(struct rig *from, struct rig *to) {
  CHECK(call(to, SLUICE_OP_METADATA, 0, NULL, NULL, 0, &e, buf, sizeof buf) == 0, "metadata");
  char blob[1024];
  size_t n = e.len;
  memcpy(blob, buf, n);
  CHECK(call(from, SLUICE_OP_LOAD, 0, NULL, blob, n, &e, buf, sizeof buf) == 0, "load");
  return e.handle;
}

static int next_message(struct rig *r, double wait) {
  while (pull(r, &e, buf, sizeof buf, wait)) {
    if (e.op == SLUICE_EV_NOTIF) {
      return 1;
    }
  }
  return 0;
}

int main(int argc, char **argv) {
  const char *dir = argc > 1 ? argv[1] : ".";
  char path[1024], why[1024];
  CHECK(sluice_ucx_new(NULL, 16, 16, 0, 0) == NULL, "without a library");
  CHECK(sluice_ucx_load("", why, sizeof why) == SLUICE_LOAD_ABSENT, "nothing is there: %s", why);
  CHECK(sluice_ucx_load("/nonexistent/libucp.so.0", why, sizeof why) == SLUICE_LOAD_ABSENT, "no file: %s", why);
  snprintf(path, sizeof path, "%s/good/libnixl_capi.so", dir);
  CHECK(sluice_ucx_load(path, why, sizeof why) == SLUICE_LOAD_SYMBOL && strstr(why, "ucp_") != NULL, "another library: %s", why);
  snprintf(path, sizeof path, "%s/ucx/libucp.so", dir);
  CHECK(sluice_ucx_load(path, why, sizeof why) == SLUICE_LOAD_OK, "the fake: %s", why);
  CHECK(sluice_ucx_load("", why, sizeof why) == SLUICE_LOAD_OK && strstr(why, "libucp") != NULL, "what is there: %s", why);
  char second[1024];
  snprintf(second, sizeof second, "%s/ucx-old/libucp.so", dir);
  CHECK(sluice_ucx_load(second, why, sizeof why) == SLUICE_LOAD_OTHER && strstr(why, "one UCX only") != NULL, "a second: %s", why);
  void *h = control_fake(path), *p;
  int (*live)(void);
  p = dlsym(h, "fake_live"), memcpy(&live, &p, sizeof p);

  /* Opening: each call, each status, and nothing is left over. */
  static const struct {
    const char *name;
    int result;
  } begins[] = {{"config_read", 1}, {"config_modify", 0}, {"init_version", 1}, {"worker_create", 1}, {"worker_set_am_recv_handler", 0}, {"worker_get_efd", 0}};
  for (size_t i = 0; i < sizeof begins / sizeof begins[0]; i++) {
    struct rig r = rig_new(16, 16);
    struct worker w;
    start(&r, &w);
    CHECK(call(&r, SLUICE_OP_METADATA, 0, NULL, NULL, 0, &e, buf, sizeof buf) == SLUICE_NO_AGENT, "before it is open");
    CHECK(call(&r, SLUICE_OP_BACKEND, 0, NULL, "UCX", 4, &e, buf, sizeof buf) == SLUICE_NO_AGENT, "without a name");
    for (size_t k = 0; k < sizeof statuses / sizeof statuses[0]; k++) {
      fake.set(begins[i].name, statuses[k], 1);
      int got = open_named(&r, "a");
      CHECK(got == expected(statuses[k]), "%s answers %d: got %d", begins[i].name, statuses[k], got);
    }
    if (begins[i].result) {
      fake.set(begins[i].name, FAKE_EMPTY, 1);
      CHECK(open_named(&r, "a") == SLUICE_GARBAGE, "%s without a result", begins[i].name);
    }
    fake.reset();
    CHECK(open_named(&r, "a") == 0, "after failures");
    CHECK(open_named(&r, "a") == SLUICE_NIXL_INVALID_STATE, "twice");
    stop(&r, &w);
    CHECK(live() == 0, "%s: %d handles are left", begins[i].name, live());
  }

  /* The one that receives has its events in a block as two processes share it. */
  struct rig a = rig_new(64, 64), b = rig_spilling(64, 16, 65536 + 512);
  struct worker ta, tb;
  start(&a, &ta);
  start(&b, &tb);
  CHECK(call(&a, SLUICE_OP_CREATE, 0, NULL, "no end", 6, &e, buf, sizeof buf) == SLUICE_BAD_PAYLOAD, "a name without its NUL");
  CHECK(call(&a, SLUICE_OP_CREATE, 0, NULL, "a", 2, &e, buf, sizeof buf) == 0, "create");
  CHECK(call(&a, SLUICE_OP_BACKEND, 0, NULL, "UCX\0NONSENSE\0x", 15, &e, buf, sizeof buf) == SLUICE_UCX_ERROR - 12, "a setting that is none");
  CHECK(call(&a, SLUICE_OP_BACKEND, 0, NULL, "UCX\0TLS", 8, &e, buf, sizeof buf) == SLUICE_BAD_PAYLOAD, "a setting without a value");
  CHECK(open_named(&a, "a") == 0 && open_named(&b, "b") == 0, "open");
  CHECK(call(&a, SLUICE_OP_REGISTER, 0, NULL, NULL, 0, &e, buf, sizeof buf) == SLUICE_MISSING, "memory");
  CHECK(call(&a, 99, 0, NULL, NULL, 0, &e, buf, sizeof buf) == SLUICE_BAD_PAYLOAD, "no such call");

  /* Addresses. */
  fake.set("worker_get_address", -3, 1);
  CHECK(call(&b, SLUICE_OP_METADATA, 0, NULL, NULL, 0, &e, buf, sizeof buf) == SLUICE_UCX_ERROR - 3, "address refused");
  fake.set("worker_get_address", FAKE_EMPTY, 1);
  CHECK(call(&b, SLUICE_OP_METADATA, 0, NULL, NULL, 0, &e, buf, sizeof buf) == SLUICE_GARBAGE, "address without a result");
  CHECK(call(&b, SLUICE_OP_METADATA, 0, NULL, NULL, 0, &e, buf, sizeof buf) == 0, "address");
  char blob[64];
  size_t n = e.len;
  memcpy(blob, buf, n);
  for (size_t cut = 0; cut < n - 8; cut++) {
    CHECK(call(&a, SLUICE_OP_LOAD, 0, NULL, blob, cut, &e, buf, sizeof buf) == SLUICE_BAD_PAYLOAD, "an address cut to %zu", cut);
  }
  blob[7] = 21;
  CHECK(call(&a, SLUICE_OP_LOAD, 0, NULL, blob, n, &e, buf, sizeof buf) == SLUICE_VERSION, "of UCX 1.21");
  blob[7] = 23;
  for (size_t k = 0; k < sizeof statuses / sizeof statuses[0]; k++) {
    fake.set("ep_create", statuses[k], 1);
    CHECK(call(&a, SLUICE_OP_LOAD, 0, NULL, blob, n, &e, buf, sizeof buf) == expected(statuses[k]), "ep_create answers %d", statuses[k]);
  }
  fake.set("ep_create", FAKE_EMPTY, 1);
  CHECK(call(&a, SLUICE_OP_LOAD, 0, NULL, blob, n, &e, buf, sizeof buf) == SLUICE_GARBAGE, "ep_create without a result");
  uint64_t peer = meet(&a, &b);
  CHECK(meet(&a, &b) == peer, "loaded again it is the same");

  /* Messages: at once, later, and what is no message. */
  CHECK(call(&a, SLUICE_OP_NOTIFY, 4711, NULL, "x", 1, &e, buf, sizeof buf) == SLUICE_BAD_HANDLE, "a peer that is none");
  CHECK(call(&a, SLUICE_OP_NOTIFY, peer, NULL, "hello", 5, &e, buf, sizeof buf) == 0, "send");
  CHECK(next_message(&b, 5) && e.aux == 1 && e.len == 6 && strcmp(buf, "bhello") != 0 && strcmp(buf, "ahello") == 0, "it came: %s", buf);
  static char big[60000];
  memset(big, 'x', sizeof big);
  CHECK(call(&a, SLUICE_OP_NOTIFY, peer, NULL, big, sizeof big, &e, buf, sizeof buf) == 0, "a big one");
  CHECK(next_message(&b, 5) && e.len == sizeof big + 1, "it came whole");
  static char too[70000];
  CHECK(call(&a, SLUICE_OP_NOTIFY, peer, NULL, too, sizeof too, &e, buf, sizeof buf) == SLUICE_BAD_PAYLOAD, "too big a one");
  fake.set("am_send_nbx", LATER, 1);
  CHECK(call(&a, SLUICE_OP_NOTIFY, peer, NULL, "later", 5, &e, buf, sizeof buf) == 0, "one that ends later");
  CHECK(next_message(&b, 5) && strcmp(buf, "alater") == 0, "it came: %s", buf);
  fake.set("am_recv", LATER, 1);
  CHECK(call(&a, SLUICE_OP_NOTIFY, peer, NULL, "rndv", 4, &e, buf, sizeof buf) == 0 && !next_message(&b, 0.1) && __atomic_load_n(&b.shared->unread, __ATOMIC_RELAXED) == 1, "a rendezvous is counted");

  /* A slow reader: its ring holds 16, nothing is lost, nothing overtakes. */
  int many = 2000;
  for (int i = 0; i < many; i++) {
    char text[16];
    int len = snprintf(text, sizeof text, "%d", i);
    while (!push(&a, SLUICE_OP_NOTIFY, 0, peer, NULL, text, (size_t)len)) {
      usleep(50);
    }
  }
  int in_order = 0;
  for (int i = 0; i < many && next_message(&b, 5); i++) {
    in_order += atoi(buf + 1) == i;
    if (i % 500 == 0) {
      usleep(2000);
    }
  }
  CHECK(in_order == many && __atomic_load_n(&b.shared->unread, __ATOMIC_RELAXED) == 1, "%d of %d in order, %llu lost", in_order, many, (unsigned long long)__atomic_load_n(&b.shared->unread, __ATOMIC_RELAXED) - 1);

  /* A peer that takes nothing for a while: the sender's ring fills, and nothing is lost. */
  fake.pending(LATER);
  fake.set("am_send_nbx", LATER, 0);
  int posted = 0, taken = 0;
  for (int refused = 0; refused < 20 && posted < many;) {
    char text[16];
    int len = snprintf(text, sizeof text, "%d", posted);
    if (push(&a, SLUICE_OP_NOTIFY, 0, peer, NULL, text, (size_t)len)) {
      posted++, refused = 0;
    } else {
      refused++, usleep(1000);
    }
  }
  fake.reset();
  CHECK(posted >= 1024 && posted < many, "%d were taken of a peer that takes none", posted);
  while (taken < posted && next_message(&b, 5) && atoi(buf + 1) == taken) {
    taken++;
  }
  CHECK(taken == posted, "%d of %d came in order", taken, posted);

  /* Failures of a send mark the peer, and loading it again mends that. */
  fake.set("am_send_nbx", -25, 1);
  CHECK(call(&a, SLUICE_OP_NOTIFY, peer, NULL, "x", 1, &e, buf, sizeof buf) == SLUICE_UCX_ERROR - 25, "refused");
  CHECK(call(&a, SLUICE_OP_NOTIFY, peer, NULL, "x", 1, &e, buf, sizeof buf) == SLUICE_PEER_DEAD, "and then not tried");
  CHECK(call(&a, SLUICE_OP_CHECK, peer, NULL, NULL, 0, &e, buf, sizeof buf) == SLUICE_PEER_DEAD, "it is told as dead");
  CHECK(meet(&a, &b) == peer && call(&a, SLUICE_OP_NOTIFY, peer, NULL, "y", 1, &e, buf, sizeof buf) == 0 && next_message(&b, 5), "mended");
  fake.set("am_send_nbx", LATER, 1);
  fake.pending(-80);
  CHECK(call(&a, SLUICE_OP_NOTIFY, peer, NULL, "x", 1, &e, buf, sizeof buf) == SLUICE_UCX_ERROR - 80, "one that fails later");
  CHECK(call(&a, SLUICE_OP_NOTIFY, peer, NULL, "x", 1, &e, buf, sizeof buf) == SLUICE_PEER_DEAD, "marks the peer too");
  fake.reset();
  CHECK(next_message(&b, 1), "the failed one came all the same");
  meet(&a, &b);

  /* A worker that cannot be armed is polled, and says so once. */
  fake.set("worker_arm", -3, 3);
  CHECK(call(&a, SLUICE_OP_CHECK, peer, NULL, NULL, 0, &e, buf, sizeof buf) == 0, "wake");
  int told = 0;
  while (pull(&a, &e, buf, sizeof buf, 0.5)) {
    told += e.op == SLUICE_EV_DONE && e.token == 0 && e.status == SLUICE_UCX_ERROR - 3;
  }
  CHECK(told == 1 && e.status == 0, "trouble told %d times, the end of it %d", told, e.status);

  /* A peer that is gone: the endpoint's error handler. */
  stop(&b, &tb);
  CHECK(call(&a, SLUICE_OP_NOTIFY, peer, NULL, "x", 1, &e, buf, sizeof buf) == 0, "a send to the gone is taken");
  CHECK(pull(&a, &e, buf, sizeof buf, 5) && e.op == SLUICE_EV_PEER_DOWN && e.handle == peer, "then it is told");
  CHECK(call(&a, SLUICE_OP_NOTIFY, peer, NULL, "x", 1, &e, buf, sizeof buf) == SLUICE_PEER_DEAD, "and no more is sent");
  CHECK(call(&a, SLUICE_OP_INVALIDATE, peer, NULL, NULL, 0, &e, buf, sizeof buf) == 0, "drop");
  CHECK(call(&a, SLUICE_OP_INVALIDATE, peer, NULL, NULL, 0, &e, buf, sizeof buf) == SLUICE_BAD_HANDLE, "twice");

  /* A library that hangs is seen from outside, with the call. */
  fake.set("worker_get_address", FAKE_HANG, 0);
  push(&a, SLUICE_OP_METADATA, 9, 0, NULL, NULL, 0);
  usleep(20000);
  CHECK(__atomic_load_n(&a.shared->busy_since, __ATOMIC_ACQUIRE) != 0 && __atomic_load_n(&a.shared->busy_op, __ATOMIC_RELAXED) == SLUICE_OP_METADATA, "busy with %llu", (unsigned long long)__atomic_load_n(&a.shared->busy_op, __ATOMIC_RELAXED));
  fake.reset();
  CHECK(pull(&a, &e, buf, sizeof buf, 5) && e.token == 9 && e.status == 0, "it came back");
  stop(&a, &ta);
  CHECK(live() == 0, "%d handles are left", live());
  return done();
}
