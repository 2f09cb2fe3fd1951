/* The parts of a worker of active messages: private to this folder. */
#ifndef SLUICE_UCX_WORKER_H
#define SLUICE_UCX_WORKER_H

#include "rings/driver.h"
#include "ucx/api.h"
#include "ucx/ucx.h"

#define AM_ID 7u
#define MAX_PEERS 4096u
#define MAX_MESSAGE (64u << 10) /* eager, in one piece */
#define MAX_SENDS 4096u         /* in flight */
#define MAX_PEER_SENDS 1024u    /* to one peer */
#define STILL_NS 2000000000ull  /* a peer without progress for this long is not waited for */
#define MAX_HELD 65536u         /* messages queued while the ring is full */
#define MAX_HELD_BYTES (16u << 20)
#define NAME_MAX_BYTES 255u

/* The blob of METADATA and LOAD: this, the name, UCP's address. */
struct address_head {
  char magic[5]; /* "SLUCX" */
  uint8_t version, major, minor, name_len;
};

struct ucx;

struct ucx_peer {
  struct ucx *u;
  char *name;
  void *ep;
  int dead; /* failed and reported; peers_close_dead closes its endpoint */
  uint32_t generation;
  uint32_t sends; /* in flight */
  uint64_t moved; /* when a send last ended, or the first started */
};

struct message { /* one that waits for space in the ring */
  struct message *next;
  size_t from_len, len;
  unsigned char bytes[];
};

struct ucx {
  struct rings rings;
  int arm_failing; /* the failure to arm the worker is reported already */
  const struct ucx_api *api;
  char name[NAME_MAX_BYTES + 1];
  void *context, *worker;
  int efd;
  struct ucx_peer peers[MAX_PEERS];
  uint32_t sends, answers; /* in flight; of them those with an answer */
  int any_dead;
  int full; /* the next command is a message that waits for earlier ones to its peer */
  struct message *held, **held_end;
  size_t held_count, held_bytes;
};

static inline int ucx_status_of(ucx_status s) { return s == UCX_OK ? 0 : s > 0 ? SLUICE_GARBAGE : SLUICE_UCX_ERROR + s; }

/* ucx_open.c */
int worker_name(struct ucx *u, const struct sluice_slot *c);
int worker_open(struct ucx *u, const struct sluice_slot *c);
void worker_metadata(struct ucx *u, uint64_t token);
void worker_release(struct ucx *u);

/* ucx_peers.c */
struct ucx_peer *peer_at(struct ucx *u, uint64_t handle); /* NULL when there is none */
int peer_load(struct ucx *u, const struct sluice_slot *c, uint64_t *handle, const char **name);
int peer_drop(struct ucx *u, uint64_t handle);
void peer_down(struct ucx *u, struct ucx_peer *p); /* reports it once */
void peers_close(struct ucx *u);
void peers_close_dead(struct ucx *u); /* never within progress, where UCX forbids it */

/* ucx_messages.c */
ucx_status message_arrived(void *arg, const void *header, size_t header_len, void *data, size_t len, const struct ucx_am_recv *param);
void messages_release(struct ucx *u); /* moves queued messages to the ring while it has space */
void messages_forget(struct ucx *u);
int message_waits(struct ucx *u, const struct sluice_slot *c); /* until some to its peer have ended */
void message_send(struct ucx *u, const struct sluice_slot *c);

#endif
