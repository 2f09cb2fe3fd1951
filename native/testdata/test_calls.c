/* Every call, every status: what the library answers is what the caller gets, a
 * success without a result is garbage, and the agent goes on. */
#include "harness.h"

static struct sluice_slot e;
static char buf[8192];

static const int statuses[] = {-1, -2, -3, -4, -5, -6, -7, -99, 2, 77, 1 << 30};

static int expected(int s) { return s >= -6 && s <= 0 ? s : SLUICE_GARBAGE; }

struct transfer_payload {
  struct sluice_transfer head;
  struct sluice_desc local, remote;
  char message[4];
};

static struct transfer_payload payload(void *from, void *to, uint64_t n) {
  struct transfer_payload p;
  memset(&p, 0, sizeof p);
  p.head = (struct sluice_transfer){1, 0, 0, 1, 1, 1, 4};
  p.local = (struct sluice_desc){(uint64_t)(uintptr_t)from, n, 0};
  p.remote = (struct sluice_desc){(uint64_t)(uintptr_t)to, n, 0};
  memcpy(p.message, "done", 4);
  return p;
}

int main(int argc, char **argv) {
  load_fake(argc > 1 ? argv[1] : ".");
  static char src[64] = "kv", dst[64];
  const uint64_t region[3] = {(uint64_t)(uintptr_t)src, sizeof src, 0};

  /* Creation. */
  static const char *const begins[] = {"create_configured_agent", "create_notif_map", "get_plugin_params", "params_add",
                                       "create_backend",          "create_opt_args",  "opt_args_add_backend"};
  for (size_t i = 0; i < sizeof begins / sizeof begins[0]; i++) {
    for (size_t k = 0; k < sizeof statuses / sizeof statuses[0]; k++) {
      struct rig r = rig_new(16, 16);
      CHECK(rig_start(&r) == 0, "start");
      CHECK(call(&r, SLUICE_OP_METADATA, 0, NULL, NULL, 0, &e, buf, sizeof buf) == SLUICE_NO_AGENT, "before creation");
      fake.set(begins[i], statuses[k], 1);
      int got = begin(&r, "a");
      CHECK(got == expected(statuses[k]), "%s answers %d: got %d", begins[i], statuses[k], got);
      fake.reset();
      rig_stop(&r);
    }
    if (strcmp(begins[i], "params_add") == 0 || strcmp(begins[i], "opt_args_add_backend") == 0) {
      continue; /* they have no result */
    }
    struct rig r = rig_new(16, 16);
    CHECK(rig_start(&r) == 0, "start");
    fake.set(begins[i], FAKE_EMPTY, 1);
    CHECK(begin(&r, "a") == SLUICE_GARBAGE, "%s without a result", begins[i]);
    fake.reset();
    rig_stop(&r);
  }

  struct rig r = rig_new(64, 64);
  CHECK(rig_start(&r) == 0, "start");
  CHECK(begin(&r, "a") == 0, "creation");
  CHECK(begin(&r, "a") == SLUICE_NIXL_INVALID_STATE, "creation twice");
  CHECK(call(&r, SLUICE_OP_PLUGINS, 0, NULL, NULL, 0, &e, buf, sizeof buf) == 0 && strcmp(buf, "UCX\nPOSIX\n") == 0, "plugins: %s", buf);
  CHECK(call(&r, 0, 0, NULL, NULL, 0, &e, buf, sizeof buf) == SLUICE_BAD_PAYLOAD, "no such call");
  CHECK(call(&r, 99, 0, NULL, NULL, 0, &e, buf, sizeof buf) == SLUICE_BAD_PAYLOAD, "no such call");

  struct sluice_slot loaded;
  CHECK(call(&r, SLUICE_OP_LOAD, 0, NULL, "a", 1, &loaded, buf, sizeof buf) == 0 && strcmp(buf, "a") == 0, "it knows itself: %s", buf);
  uint64_t peer = loaded.handle;

  /* Calls with one library function each. */
  static const struct {
    uint32_t op;
    const char *function;
    int result; /* it has one */
  } calls[] = {
      {SLUICE_OP_PLUGINS, "get_available_plugins", 1}, {SLUICE_OP_PLUGINS, "string_list_size", 0},
      {SLUICE_OP_PLUGINS, "string_list_get", 0},       {SLUICE_OP_REGISTER, "create_reg_dlist", 1},
      {SLUICE_OP_REGISTER, "reg_dlist_add_desc", 0},   {SLUICE_OP_REGISTER, "register_mem", 0},
      {SLUICE_OP_METADATA, "get_local_md", 1},         {SLUICE_OP_LOAD, "load_remote_md", 1},
      {SLUICE_OP_CHECK, "check_remote_md", 0},
  };
  for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++) {
    for (size_t k = 0; k < sizeof statuses / sizeof statuses[0]; k++) {
      fake.set(calls[i].function, statuses[k], 1);
      int got = call(&r, calls[i].op, peer, region, "a", 1, &e, buf, sizeof buf);
      CHECK(got == expected(statuses[k]), "%s answers %d: got %d", calls[i].function, statuses[k], got);
    }
    if (calls[i].result) {
      fake.set(calls[i].function, FAKE_EMPTY, 1);
      CHECK(call(&r, calls[i].op, peer, region, "a", 1, &e, buf, sizeof buf) == SLUICE_GARBAGE, "%s without a result", calls[i].function);
    }
    fake.reset();
    CHECK(call(&r, calls[i].op, peer, region, "a", 1, &e, buf, sizeof buf) == 0, "%s works again", calls[i].function);
  }
  CHECK(call(&r, SLUICE_OP_CONNECT, peer, NULL, NULL, 0, &e, buf, sizeof buf) == SLUICE_MISSING, "an optional call that is not there");

  /* Handles: another generation, out of range, twice. */
  CHECK(call(&r, SLUICE_OP_REGISTER, 0, region, NULL, 0, &e, buf, sizeof buf) == 0, "register");
  uint64_t handle = e.handle;
  CHECK(call(&r, SLUICE_OP_DEREGISTER, handle ^ ((uint64_t)1 << 40), NULL, NULL, 0, &e, buf, sizeof buf) == SLUICE_BAD_HANDLE, "generation");
  CHECK(call(&r, SLUICE_OP_DEREGISTER, 0xffffffffu, NULL, NULL, 0, &e, buf, sizeof buf) == SLUICE_BAD_HANDLE, "range");
  CHECK(call(&r, SLUICE_OP_DEREGISTER, handle, NULL, NULL, 0, &e, buf, sizeof buf) == 0, "deregister");
  CHECK(call(&r, SLUICE_OP_DEREGISTER, handle, NULL, NULL, 0, &e, buf, sizeof buf) == SLUICE_BAD_HANDLE, "twice");
  CHECK(call(&r, SLUICE_OP_NOTIFY, 12345, NULL, "x", 1, &e, buf, sizeof buf) == SLUICE_BAD_HANDLE, "a peer that is none");

  /* Transfers. */
  static const char *const steps[] = {"create_xfer_dlist",      "xfer_dlist_add_desc", "create_opt_args", "opt_args_add_backend", "opt_args_set_notif_msg",
                                      "opt_args_set_has_notif", "create_xfer_req",     "post_xfer_req"};
  struct transfer_payload p = payload(src, dst, sizeof src);
  for (size_t i = 0; i < sizeof steps / sizeof steps[0]; i++) {
    for (size_t k = 0; k < sizeof statuses / sizeof statuses[0]; k++) {
      if (strcmp(steps[i], "post_xfer_req") == 0 && statuses[k] == -2) {
        continue; /* marks the peer; below */
      }
      fake.set(steps[i], statuses[k], 1);
      int got = call(&r, SLUICE_OP_TRANSFER, peer, NULL, &p, 68, &e, buf, sizeof buf);
      CHECK(got == expected(statuses[k]), "%s answers %d: got %d", steps[i], statuses[k], got);
      fake.reset();
    }
  }
  memset(dst, 0, sizeof dst);
  fake.pending(5);
  CHECK(call(&r, SLUICE_OP_TRANSFER, peer, NULL, &p, 68, &e, buf, sizeof buf) == 0, "transfer");
  CHECK(e.aux == 1 && e.arg[1] == 7 && e.arg[2] == sizeof src && memcmp(src, dst, sizeof src) == 0, "with telemetry and data");
  CHECK(pull(&r, &e, buf, sizeof buf, 5) && e.op == SLUICE_EV_NOTIF && e.aux == 1 && strcmp(buf, "adone") == 0, "and its notification: %s", buf);
  CHECK(call(&r, SLUICE_OP_TRANSFER, peer, NULL, &p, 67, &e, buf, sizeof buf) == SLUICE_BAD_PAYLOAD, "a payload too short");
  p.head.locals = 0xffffffffu;
  CHECK(call(&r, SLUICE_OP_TRANSFER, peer, NULL, &p, 68, &e, buf, sizeof buf) == SLUICE_BAD_PAYLOAD, "a count that lies");
  p = payload(src, dst, sizeof src);

  /* One that is canceled while in progress; its release is refused for a while. */
  fake.pending(1 << 30);
  fake.set("release_xfer_req", -3, 50);
  CHECK(push(&r, SLUICE_OP_TRANSFER, 5, peer, NULL, &p, 68), "push");
  CHECK(push(&r, SLUICE_OP_CANCEL, 0, 5, NULL, NULL, 0), "push");
  CHECK(pull(&r, &e, buf, sizeof buf, 5) && e.token == 5 && e.status == SLUICE_CANCELED, "canceled: %d", e.status);
  fake.reset();

  /* Notifications that cannot be read are counted, not passed on. */
  static const char *const reads[] = {"notif_map_get_agent_at", "notif_map_get_notifs_size", "notif_map_get_notif"};
  for (size_t i = 0; i < sizeof reads / sizeof reads[0]; i++) {
    uint64_t before = __atomic_load_n(&r.shared->unread, __ATOMIC_RELAXED), after;
    fake.set(reads[i], i == 2 ? FAKE_EMPTY : -1, 1);
    CHECK(call(&r, SLUICE_OP_NOTIFY, peer, NULL, "lost", 4, &e, buf, sizeof buf) == 0, "notify");
    for (double end = now_s() + 5; (after = __atomic_load_n(&r.shared->unread, __ATOMIC_RELAXED)) == before && now_s() < end;) {
      usleep(100);
    }
    CHECK(after == before + 1, "%s: unread %llu", reads[i], (unsigned long long)after);
    fake.reset();
  }
  fake.set("get_notifs", -2, 3);
  CHECK(pull(&r, &e, buf, sizeof buf, 5) && e.op == SLUICE_EV_DONE && e.token == 0 && e.status == -2, "a failing look is told once");
  CHECK(!pull(&r, &e, buf, sizeof buf, 0.05), "and not again");
  fake.set("notif_map_size", FAKE_EMPTY, 1);
  CHECK(pull(&r, &e, buf, sizeof buf, 5) && e.status == 0, "a map of 2^64 agents is no map");

  /* A payload beside its slot, both ways. */
  static char big[4000];
  memset(big, 'b', sizeof big);
  CHECK(call(&r, SLUICE_OP_NOTIFY, peer, NULL, big, sizeof big, &e, buf, sizeof buf) == 0, "notify");
  CHECK(pull(&r, &e, buf, sizeof buf, 5) && e.op == SLUICE_EV_NOTIF && e.len == sizeof big + 1 && buf[1] == 'b' && buf[4000] == 'b', "long message");

  /* A peer that fails is told once, and not called again until it is loaded anew. */
  fake.set("gen_notif", -2, 0);
  CHECK(push(&r, SLUICE_OP_NOTIFY, 0, peer, NULL, "x", 1), "push");
  CHECK(pull(&r, &e, buf, sizeof buf, 5) && e.op == SLUICE_EV_PEER_DOWN && e.handle == peer, "peer down");
  int called = fake.calls("gen_notif");
  CHECK(call(&r, SLUICE_OP_NOTIFY, peer, NULL, "x", 1, &e, buf, sizeof buf) == SLUICE_PEER_DEAD, "dead");
  CHECK(call(&r, SLUICE_OP_TRANSFER, peer, NULL, &p, 68, &e, buf, sizeof buf) == SLUICE_PEER_DEAD, "dead");
  CHECK(fake.calls("gen_notif") == called, "the library is not asked again");
  fake.reset();
  CHECK(call(&r, SLUICE_OP_LOAD, 0, NULL, "a", 1, &e, buf, sizeof buf) == 0 && e.handle == peer, "loaded anew");
  CHECK(call(&r, SLUICE_OP_NOTIFY, peer, NULL, "x", 1, &e, buf, sizeof buf) == 0, "alive");
  CHECK(call(&r, SLUICE_OP_INVALIDATE, peer, NULL, NULL, 0, &e, buf, sizeof buf) == 0, "dropped");
  CHECK(call(&r, SLUICE_OP_NOTIFY, peer, NULL, "x", 1, &e, buf, sizeof buf) == SLUICE_BAD_HANDLE, "gone");
  rig_stop(&r);
  return done();
}
