/* A sender of notifications that is no agent of ours: sends COUNT, one a millisecond,
 * each the time it was sent (CLOCK_REALTIME, ns, decimal), so that the receiver alone
 * is measured. No more than NIXL's calls, from one thread. What NIXL has not sent yet
 * goes when the sender calls it, so it goes on calling until its input ends, for 30 s at
 * most: connecting alone may take seconds on a busy machine.
 *
 *   nixl_sender LIBNIXL_CAPI HEX-OF-METADATA COUNT */
#define _GNU_SOURCE
#include "dl/dl.h"
#include "nixl/api.h"
#include "nixl/nixl.h"

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>

static int fail(const char *what, int code) {
  fprintf(stderr, "nixl_sender: %s: %d\n", what, code);
  return 1;
}

static long long now(clockid_t c) {
  struct timespec t;
  clock_gettime(c, &t);
  return (long long)t.tv_sec * 1000000000 + t.tv_nsec;
}

int main(int argc, char **argv) {
  char why[4096] = "";
  if (argc != 4 || sluice_nixl_load(argv[1], why, sizeof why) != 0) {
    return fail(argc != 4 ? "arguments" : why, 2);
  }
  const struct nixl_api *f = sluice_nixl_api();
  size_t n = strlen(argv[2]) / 2;
  unsigned char *blob = malloc(n + 1);
  for (size_t i = 0; i < n; i++) {
    sscanf(argv[2] + 2 * i, "%2hhx", &blob[i]);
  }
  struct nixl_config config;
  memset(&config, 0, sizeof config);
  config.thread_sync = NIXL_SYNC_STRICT;
  config.num_workers = 1;
  config.lthr_delay_us = 100000;
  void *agent = NULL, *mems = NULL, *params = NULL, *backend = NULL, *options = NULL, *notifs = NULL;
  char *peer = NULL;
  int s;
  if ((s = f->create_configured_agent("nixl_sender", &config, &agent)) != 0 || (s = f->get_plugin_params(agent, "UCX", &mems, &params)) != 0 ||
      (s = f->create_backend(agent, "UCX", params, &backend)) != 0 || (s = f->create_opt_args(&options)) != 0 ||
      (s = f->opt_args_add_backend(options, backend)) != 0 || (s = f->create_notif_map(&notifs)) != 0 ||
      (s = f->load_remote_md(agent, blob, n, &peer)) != 0) {
    return fail("set-up", s);
  }
  prctl(PR_SET_TIMERSLACK, 1000, 0, 0, 0);
  long count = atol(argv[3]);
  long long next = now(CLOCK_MONOTONIC);
  for (long i = 0; i < count; i++) {
    char text[64];
    int len = snprintf(text, sizeof text, "%lld", now(CLOCK_REALTIME));
    if ((s = f->gen_notif(agent, peer, text, (size_t)len, options)) != 0) {
      return fail("send", s);
    }
    f->get_notifs(agent, notifs, options); /* progress: it has no thread for it */
    next += 1000000;
    long long left = next - now(CLOCK_MONOTONIC);
    if (left > 0) {
      nanosleep(&(struct timespec){0, (long)left}, NULL);
    }
  }
  struct pollfd input = {.fd = 0, .events = POLLIN};
  for (long long end = now(CLOCK_MONOTONIC) + 30000000000; now(CLOCK_MONOTONIC) < end && poll(&input, 1, 1) == 0;) {
    f->get_notifs(agent, notifs, options);
  }
  return 0;
}
