/* Descriptors inside the library that become readable on arrivals. NIXL exposes none, but
 * the workers and the TCP transport of its UCX wait on epoll descriptors. The thread waits
 * on those epoll descriptors that appear while a backend is created. Other code of the
 * process may create some at the same time, but those are close-on-exec, as Go's, libzmq's
 * and Sluice's are, and UCX's (seen with 1.23) are not. Nothing is ever read from them: a
 * readable descriptor is only a hint to poll, and polling continues without it, less often
 * (agent.c). */
#define _GNU_SOURCE
#include "nixl/agent.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MOST_FDS 65536

/* The epoll descriptors of the process that are not close-on-exec, as a bit set. */
static void epolls(unsigned char *bits) {
  memset(bits, 0, MOST_FDS / 8);
  DIR *d = opendir("/proc/self/fd");
  if (d == NULL) {
    return;
  }
  for (struct dirent *e; (e = readdir(d)) != NULL;) {
    char path[64], target[32];
    long fd = strtol(e->d_name, NULL, 10);
    if (e->d_name[0] == '.' || fd < 0 || fd >= MOST_FDS) {
      continue;
    }
    snprintf(path, sizeof path, "/proc/self/fd/%ld", fd);
    ssize_t n = readlink(path, target, sizeof target - 1);
    target[n > 0 ? n : 0] = '\0';
    if (strcmp(target, "anon_inode:[eventpoll]") == 0 && (fcntl((int)fd, F_GETFD) & FD_CLOEXEC) == 0) {
      bits[fd / 8] |= (unsigned char)(1u << fd % 8);
    }
  }
  closedir(d);
}

void *arrivals_before(void) {
  unsigned char *bits = malloc(MOST_FDS / 8);
  if (bits != NULL) {
    epolls(bits);
  }
  return bits;
}

void arrivals_find(struct agent *a, void *before) {
  unsigned char *was = before, *is = was != NULL ? malloc(MOST_FDS / 8) : NULL;
  if (is != NULL) {
    epolls(is);
    for (int fd = 0; fd < MOST_FDS && a->arrival_count < MAX_ARRIVALS; fd++) {
      if ((is[fd / 8] & ~was[fd / 8]) >> fd % 8 & 1) {
        /* A copy, because the number is reused if the library closes its own. */
        int own = fcntl(fd, F_DUPFD_CLOEXEC, 0);
        if (own >= 0) {
          a->arrivals[a->arrival_count++] = own;
        }
      }
    }
  }
  free(is);
  free(was);
}

void arrivals_release(struct agent *a) {
  while (a->arrival_count > 0) {
    close(a->arrivals[--a->arrival_count]);
  }
}
