/* Arrivals without a command: notifications, and records on boards. */
#define _GNU_SOURCE
#include "nixl/agent.h"

#include <string.h>

static void unread(struct agent *a) { __atomic_store_n(&a->rings.shared->unread, a->rings.shared->unread + 1, __ATOMIC_RELAXED); }

static void notifs_clear(struct agent *a) {
  a->api->notif_map_clear(a->notifs);
  a->notifs_pending = 0;
}

/* Moves the notifications in the map to the ring. The map is cleared, and the library
 * polled again, only after all of them are in the ring: while the reader is slow, further
 * notifications stay in the library, and none is lost. */
static int notifs_drain(struct agent *a) {
  int did = 0;
  while (a->notif_agent < a->notif_agents) {
    const char *from = NULL;
    size_t count = 0;
    if (a->api->notif_map_get_agent_at(a->notifs, a->notif_agent, &from) != 0 || from == NULL ||
        a->api->notif_map_get_notifs_size(a->notifs, from, &count) != 0) {
      unread(a); /* a C string cannot pass a name that contains a NUL */
      a->notif_agent++;
      a->notif_next = 0;
      continue;
    }
    size_t from_len = strlen(from);
    for (; a->notif_next < count; a->notif_next++) {
      const void *message = NULL;
      size_t len = 0;
      if (a->api->notif_map_get_notif(a->notifs, from, a->notif_next, &message, &len) != 0 || (message == NULL && len > 0) ||
          len > SLUICE_BIG_MAX || from_len > 4096) {
        unread(a);
        continue;
      }
      struct sluice_slot *e = rings_next_event(&a->rings);
      if (e == NULL) {
        return did;
      }
      if (!rings_event_payload(&a->rings, e, from, from_len, message, len)) {
        unread(a);
        continue;
      }
      e->op = SLUICE_EV_NOTIF;
      e->aux = (uint32_t)from_len;
      rings_publish(&a->rings);
      did++;
    }
    a->notif_agent++;
    a->notif_next = 0;
  }
  notifs_clear(a);
  return did;
}

int notifs_poll(struct agent *a) {
  if (a->backend == NULL) {
    return 0;
  }
  if (a->notifs_pending) {
    return notifs_drain(a);
  }
  rings_enter_library(&a->rings, SLUICE_OP_LAST + 1);
  int s = a->api->get_notifs(a->nixl, a->notifs, a->options);
  size_t agents = 0;
  if (s == 0) {
    s = a->api->notif_map_size(a->notifs, &agents);
  }
  rings_leave_library(&a->rings);
  if (s != 0 || agents > (1u << 20)) {
    if (a->notif_errors++ == 0) {
      rings_answer(&a->rings, 0, agent_status(s), SLUICE_OP_LAST + 1, NULL, 0);
    }
    return 0;
  }
  a->notif_errors = 0;
  if (agents == 0) {
    return 0;
  }
  a->notif_agents = agents;
  a->notif_agent = a->notif_next = 0;
  a->notifs_pending = 1;
  return notifs_drain(a);
}

/* Reports whether a record is complete and matches the cell of its slot, and copies it to words. A
 * torn write is checked again in the next iteration; a foreign one is counted once for
 * each sequence. The copy that was compared is what is reported, because any writer may
 * overwrite the slot at any time. */
static int record_matches(const struct sluice_record *r, const struct sluice_slot_cell *t, uint64_t words[8]) {
  const uint64_t *w = (const uint64_t *)(const void *)r;
  uint64_t want = __atomic_load_n(&t->sequence, __ATOMIC_ACQUIRE), check = 0;
  words[7] = __atomic_load_n(&w[7], __ATOMIC_ACQUIRE);
  if (words[7] != want) {
    return 0;
  }
  for (int i = 0; i < 7; i++) {
    words[i] = __atomic_load_n(&w[i], __ATOMIC_RELAXED);
    check ^= i == 6 ? 0 : words[i];
  }
  return (uint32_t)words[0] == SLUICE_RECORD_VERSION && words[1] == __atomic_load_n(&t->nonce, __ATOMIC_RELAXED) &&
         words[2] == __atomic_load_n(&t->request, __ATOMIC_RELAXED) && words[6] == (check ^ words[7]);
}

int boards_sweep(struct agent *a) {
  int did = 0;
  for (uint32_t b = 0; b < a->board_count; b++) {
    struct board *bd = &a->boards[b];
    struct sluice_slot_cell *cells = (struct sluice_slot_cell *)(bd->control + 1);
    uint64_t *bits = (uint64_t *)(cells + bd->count);
    uint64_t words = __atomic_load_n(&bd->control->words, __ATOMIC_ACQUIRE);
    if (words > (bd->count + 63) / 64) {
      words = (bd->count + 63) / 64;
    }
    for (uint64_t k = 0; k < words && k < SWEEP_WORDS; k++) {
      uint64_t i = bd->cursor < words ? bd->cursor : 0;
      bd->cursor = i + 1;
      uint64_t set = __atomic_load_n(&bits[i], __ATOMIC_ACQUIRE);
      while (set != 0) {
        uint64_t slot = i * 64 + (uint64_t)__builtin_ctzll(set), record[8];
        uint64_t bit = set & -set;
        set &= set - 1;
        if (slot >= bd->count) {
          break;
        }
        struct sluice_slot_cell *t = &cells[slot];
        if (!record_matches(&bd->slots[slot], t, record)) {
          if (record[7] != 0 && record[7] != t->last_bad) {
            t->last_bad = record[7];
            __atomic_fetch_add(&a->rings.shared->foreign, 1, __ATOMIC_RELAXED);
          }
          continue;
        }
        struct sluice_slot *e = rings_next_event(&a->rings);
        if (e == NULL) {
          return did;
        }
        e->op = SLUICE_EV_BOARD;
        e->handle = slot;
        e->arg[0] = b;
        memcpy(e->data, record, sizeof record);
        e->len = sizeof record;
        /* Cleared before the event is published: the reader may lease the slot again. */
        __atomic_fetch_and(&bits[i], ~bit, __ATOMIC_SEQ_CST);
        rings_publish(&a->rings);
        did++;
      }
    }
  }
  return did;
}
