/* The thread and its rings: many producers, a slow reader, a library that hangs,
 * a board, sleep. */
#include "harness.h"

#include <pthread.h>
#include <sys/resource.h>

static struct sluice_slot e;
static char buf[1024];

#define PRODUCERS 4
#define EACH 5000

struct producer {
  struct rig *r;
  uint64_t peer, base;
};

static void *produce(void *p) {
  struct producer *me = p;
  for (uint64_t i = 0; i < EACH; i++) {
    while (!push(me->r, SLUICE_OP_NOTIFY, me->base + i, me->peer, NULL, &i, sizeof i)) {
      usleep(50);
    }
  }
  return NULL;
}

static void many_producers(struct rig *r, uint64_t peer) {
  pthread_t t[PRODUCERS];
  struct producer p[PRODUCERS];
  uint64_t next[PRODUCERS] = {0}, answers = 0, notifs = 0;
  for (uint64_t i = 0; i < PRODUCERS; i++) {
    p[i] = (struct producer){r, peer, (i + 1) << 32};
    pthread_create(&t[i], NULL, produce, &p[i]);
  }
  while (answers < PRODUCERS * EACH || notifs < PRODUCERS * EACH) {
    if (!pull(r, &e, buf, sizeof buf, 20)) {
      break;
    }
    if (e.op == SLUICE_EV_NOTIF) {
      notifs++;
      continue;
    }
    uint64_t who = (e.token >> 32) - 1;
    CHECK(who < PRODUCERS && e.status == 0 && (e.token & 0xffffffff) == next[who], "producer %llu: answer %llu, status %d",
          (unsigned long long)who, (unsigned long long)(e.token & 0xffffffff), e.status);
    next[who]++;
    answers++;
  }
  for (int i = 0; i < PRODUCERS; i++) {
    pthread_join(t[i], NULL);
  }
  CHECK(answers == PRODUCERS * EACH && notifs == PRODUCERS * EACH, "%llu answers, %llu notifications", (unsigned long long)answers,
        (unsigned long long)notifs);
}

static void a_hang(struct rig *r, uint64_t peer) {
  fake.set("gen_notif", FAKE_HANG, 0);
  double began = now_s();
  CHECK(push(r, SLUICE_OP_NOTIFY, 7, peer, NULL, "x", 1), "push");
  CHECK(!pull(r, &e, buf, sizeof buf, 0.05), "no answer");
  CHECK(__atomic_load_n(&r->shared->busy_since, __ATOMIC_ACQUIRE) != 0 && __atomic_load_n(&r->shared->busy_op, __ATOMIC_RELAXED) == SLUICE_OP_NOTIFY, "it is seen to be in the call");
  uint32_t n = 0;
  while (push(r, SLUICE_OP_METADATA, 100 + n, 0, NULL, NULL, 0)) {
    n++;
  }
  CHECK(n >= r->ncommands - 1 && now_s() - began < 2, "the ring takes %u more and then refuses, without waiting", n);
  fake.reset();
  CHECK(pull(r, &e, buf, sizeof buf, 10) && e.token == 7 && e.status == 0, "then it goes on");
  for (uint32_t i = 0; i < n;) {
    if (!pull(r, &e, buf, sizeof buf, 10)) {
      CHECK(0, "%u of %u answers", i, n);
      break;
    }
    i += e.op == SLUICE_EV_DONE;
  }
}

struct boards {
  struct sluice_board control;
  struct sluice_slot_cell cells[128];
  uint64_t bits[2];
};

static void put(struct sluice_record *slot, struct sluice_record rec) {
  uint64_t w[8];
  rec.check = 0;
  memcpy(w, &rec, sizeof w);
  uint64_t check = w[0] ^ w[1] ^ w[2] ^ w[3] ^ w[4] ^ w[5] ^ w[7];
  w[6] = check;
  uint64_t *to = (uint64_t *)(void *)slot;
  for (int i = 0; i < 8; i++) {
    __atomic_store_n(&to[i], w[i], __ATOMIC_RELEASE);
  }
}

static void lease(struct boards *on, uint32_t slot, uint64_t sequence, uint64_t nonce) {
  __atomic_store_n(&on->cells[slot].nonce, nonce, __ATOMIC_RELAXED);
  __atomic_store_n(&on->cells[slot].request, 42, __ATOMIC_RELAXED);
  __atomic_store_n(&on->cells[slot].sequence, sequence, __ATOMIC_RELEASE);
  __atomic_store_n(&on->control.words, 2, __ATOMIC_RELEASE);
  __atomic_fetch_or(&on->bits[slot / 64], (uint64_t)1 << (slot % 64), __ATOMIC_SEQ_CST);
}

static struct boards *b;
static struct sluice_record *slots;

static void a_board(struct rig *r) {
  b = calloc(1, sizeof *b);
  slots = aligned_alloc(64, 128 * sizeof *slots);
  memset(slots, 0, 128 * sizeof *slots);
  uint64_t args[3] = {(uint64_t)(uintptr_t)b, (uint64_t)(uintptr_t)slots, 128};
  CHECK(call(r, SLUICE_OP_BOARD, 0, args, NULL, 0, &e, buf, sizeof buf) == 0, "board");
  args[1] += 4;
  CHECK(call(r, SLUICE_OP_BOARD, 0, args, NULL, 0, &e, buf, sizeof buf) == SLUICE_BAD_PAYLOAD, "a board that is not aligned");

  struct sluice_record good = {SLUICE_RECORD_VERSION, 0, 0xabc, 42, 4096, 17, 1, 2, 0, 9};
  lease(b, 100, 9, 0xabc);
  put(&slots[100], good);
  CHECK(pull(r, &e, buf, sizeof buf, 5) && e.op == SLUICE_EV_BOARD && e.handle == 100 && e.len == sizeof good && ((struct sluice_record *)(void *)buf)->sequence == 9 &&
            ((struct sluice_record *)(void *)buf)->bytes == 4096,
        "a record lands");
  CHECK(!pull(r, &e, buf, sizeof buf, 0.03), "and is told once");

  uint64_t before = __atomic_load_n(&r->shared->foreign, __ATOMIC_RELAXED);
  lease(b, 3, 10, 0xdef);
  struct sluice_record late = good, forged = good, version = good, torn = good;
  late.sequence = 8;
  late.nonce = 0xdef;
  put(&slots[3], late);
  CHECK(!pull(r, &e, buf, sizeof buf, 0.03), "a late record is not told");
  forged.sequence = 10;
  put(&slots[3], forged);
  CHECK(!pull(r, &e, buf, sizeof buf, 0.03), "nor one with another's nonce");
  CHECK(__atomic_load_n(&r->shared->foreign, __ATOMIC_RELAXED) == before + 2, "both are counted, once: %llu",
        (unsigned long long)(__atomic_load_n(&r->shared->foreign, __ATOMIC_RELAXED) - before));
  struct sluice_record other = forged;
  other.nonce = 0xdef;
  other.request = 43;
  put(&slots[3], other);
  CHECK(!pull(r, &e, buf, sizeof buf, 0.03), "nor one of another request, which may still write the right one");
  version.version = 2;
  version.sequence = 10;
  version.nonce = 0xdef;
  put(&slots[3], version);
  CHECK(!pull(r, &e, buf, sizeof buf, 0.03), "nor one of another version");
  torn.sequence = 10;
  torn.nonce = 0xdef;
  put(&slots[3], torn);
  __atomic_store_n(&slots[3].bytes, 1, __ATOMIC_RELEASE);
  /* The whole record may have been seen before it was torn again. */
  int early = pull(r, &e, buf, sizeof buf, 0.03);
  __atomic_store_n(&slots[3].bytes, 4096, __ATOMIC_RELEASE);
  CHECK(early || (pull(r, &e, buf, sizeof buf, 5) && e.handle == 3 && ((struct sluice_record *)(void *)buf)->sequence == 10), "the right one is told, after it is whole");
  CHECK(__atomic_load_n(&r->shared->foreign, __ATOMIC_RELAXED) - before <= 3, "counted: %llu", (unsigned long long)(__atomic_load_n(&r->shared->foreign, __ATOMIC_RELAXED) - before));
}

static double cpu(void) {
  struct rusage u;
  getrusage(RUSAGE_SELF, &u);
  return (double)u.ru_utime.tv_sec + (double)u.ru_stime.tv_sec + (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec) / 1e6;
}

static void sleep_and_wake(struct rig *r) {
  usleep(50000); /* it has dozed off */
  uint64_t beats = __atomic_load_n(&r->shared->beats, __ATOMIC_RELAXED);
  double before = cpu();
  usleep(300000);
  uint64_t passes = __atomic_load_n(&r->shared->beats, __ATOMIC_RELAXED) - beats;
  CHECK(passes > 10 && passes < 200, "idle: %llu passes in 300 ms", (unsigned long long)passes);
  CHECK(cpu() - before < 0.06, "idle: %.0f ms of CPU in 300 ms", (cpu() - before) * 1000);
  double best = 1;
  for (int i = 0; i < 20; i++) {
    usleep(12000);
    double t = now_s();
    CHECK(call(r, SLUICE_OP_METADATA, 0, NULL, NULL, 0, &e, buf, sizeof buf) == 0, "metadata");
    t = now_s() - t;
    best = t < best ? t : best;
  }
  CHECK(best < 0.004, "a command wakes it before its sleep of 5 ms is over: %.0f us", best * 1e6);
}

int main(int argc, char **argv) {
  load_fake(argc > 1 ? argv[1] : ".");
  struct rig r = rig_spilling(64, 64, 1u << 16); /* as a block of two processes; test_calls has the other */
  CHECK(rig_start(&r) == 0 && begin(&r, "a") == 0, "start");
  CHECK(call(&r, SLUICE_OP_LOAD, 0, NULL, "a", 1, &e, buf, sizeof buf) == 0, "peer");
  uint64_t peer = e.handle;
  sleep_and_wake(&r);
  many_producers(&r, peer);
  a_hang(&r, peer);
  a_board(&r);
  rig_stop(&r);
  free(b); /* the board stays with the agent until its end */
  free(slots);

  struct rig bad = rig_new(16, 16);
  CHECK(sluice_agent_start(bad.shared, 15, 16, 0, bad.wake, bad.event, &(struct sluice_poll_intervals){1, 1, 1}) != 0, "15 is no power of two");
  CHECK(sluice_agent_start(NULL, 16, 16, 0, bad.wake, bad.event, &(struct sluice_poll_intervals){1, 1, 1}) != 0, "no block");
  close(bad.wake);
  close(bad.event);
  free(bad.shared);
  return done();
}
