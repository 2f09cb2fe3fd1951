/* Finding and refusing libraries; the process's environment and signals. */
#include "cuda/cuda.h"
#include "harness.h"

#include <signal.h>

static char why[2048];

static int load(const char *dir, const char *name) {
  char path[1024];
  snprintf(path, sizeof path, "%s/%s", dir, name);
  return sluice_nixl_load(path, why, sizeof why);
}

static void mine(int s) { (void)s; }

int main(int argc, char **argv) {
  const char *dir = argc > 1 ? argv[1] : ".";
  CHECK(sluice_native_abi() == SLUICE_NATIVE_ABI, "abi of header and library agree");
  CHECK(sluice_dl_resident("libc.so.6") == 1, "libc is resident");
  CHECK(sluice_dl_resident("libsluice-no-such.so.9") == 0, "an unknown library is not resident");
  CHECK(sluice_dl_resident("") == -1 && sluice_dl_resident(NULL) == -1, "an empty name is refused");
  CHECK(sizeof(struct sluice_slot) == SLUICE_SLOT, "a slot has %zu bytes", sizeof(struct sluice_slot));
  CHECK(sizeof(struct sluice_record) == 64, "a record has %zu bytes", sizeof(struct sluice_record));

  struct sluice_poll_intervals poll = {1, 1, 1};
  struct sluice_shared shared;
  CHECK(sluice_agent_start(&shared, 16, 16, 0, 0, 0, &poll) != 0, "an agent without a library is refused");

  signal(SIGHUP, mine);
  setenv("UCX_MEM_EVENTS", "y", 1);
  setenv("UCX_LOG_FILE", "/tmp/ucx.log", 1);
  CHECK(load(dir, "absent/libnixl_capi.so") == SLUICE_LOAD_ABSENT && strstr(why, "no such file"), "absent: %s", why);
  CHECK(sluice_nixl_load("libnixl_capi-not-there.so.0", why, sizeof why) == SLUICE_LOAD_ABSENT, "a bare name that is nowhere: %s", why);
  CHECK(sluice_nixl_load("", why, sizeof why) == SLUICE_LOAD_ABSENT, "an empty path: %s", why);
  CHECK(sluice_nixl_load(NULL, why, sizeof why) == SLUICE_LOAD_ABSENT, "no path: %s", why);

  char garbage[1024];
  snprintf(garbage, sizeof garbage, "%s/garbage.so", dir);
  FILE *f = fopen(garbage, "w");
  if (f != NULL) {
    fputs("\177ELF this is not a library", f);
    fclose(f);
  }
  CHECK(load(dir, "garbage.so") == SLUICE_LOAD_BROKEN && strstr(why, "garbage.so"), "garbage: %s", why);
  CHECK(sluice_nixl_load(dir, why, sizeof why) == SLUICE_LOAD_BROKEN, "a folder: %s", why);
  CHECK(load(dir, "old/libnixl_capi.so") == SLUICE_LOAD_SYMBOL && strstr(why, "nixl_capi_gen_notif"), "too old: %s", why);
  CHECK(load(dir, "stub/libnixl_capi.so") == SLUICE_LOAD_STUB, "stub: %s", why);
  CHECK(load(dir, "new/libnixl_capi.so.7") == SLUICE_LOAD_TOO_NEW && strstr(why, ".so.7"), "too new: %s", why);
  CHECK(sluice_nixl_load("libm.so.6", why, sizeof why) == SLUICE_LOAD_TOO_NEW, "another library altogether: %s", why);

  load_fake(dir);
  CHECK(load(dir, "good/libnixl_capi.so") == SLUICE_LOAD_OK, "again: %s", why);
  CHECK(load(dir, "stub/libnixl_capi.so") == SLUICE_LOAD_OTHER && strstr(why, "good"), "another one: %s", why);
  CHECK(strcmp(getenv("UCX_DEBUG_SIGNO"), "0") == 0, "UCX_DEBUG_SIGNO");
  CHECK(strcmp(getenv("UCX_HANDLE_ERRORS"), "none") == 0, "UCX_HANDLE_ERRORS");
  CHECK(strcmp(getenv("UCX_MEM_EVENTS"), "n") == 0, "UCX_MEM_EVENTS");
  CHECK(strcmp(getenv("UCX_LOG_FILE"), "/tmp/ucx.log") == 0, "an operator's UCX_LOG_FILE stays");

  /* A backend that takes SIGHUP does not keep it. */
  fake.set("take_signal", 1, 1);
  struct rig r = rig_new(16, 16);
  CHECK(rig_start(&r) == 0, "start");
  CHECK(begin(&r, "a") == 0, "agent and backend");
  struct sigaction now;
  sigaction(SIGHUP, NULL, &now);
  CHECK(now.sa_handler == mine, "SIGHUP is ours again");
  CHECK(r.shared->signals == (uint64_t)1 << SIGHUP, "and it is told: %llx", (unsigned long long)r.shared->signals);
  rig_stop(&r);

  /* What the program changes itself stays. */
  signal(SIGUSR1, mine);
  CHECK(sluice_signals_restore() == 0, "nothing was taken");
  sigaction(SIGUSR1, NULL, &now);
  CHECK(now.sa_handler == mine, "the program's own handler stays");

  char text[256];
  int devices = -1;
  int cuda = sluice_cuda_count(&devices, text, sizeof text);
  CHECK(cuda == 0 ? devices >= 0 : text[0] != '\0', "CUDA is there, or says why not: %d", cuda);
  uint64_t address;
  CHECK(sluice_cuda_open(-1, text, sizeof text) != 0 && sluice_cuda_alloc(99, 1, &address) != 0, "no such device");
  return done();
}
