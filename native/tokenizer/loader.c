#define _GNU_SOURCE
#include "tokenizer/loader.h"

#include "dl/dl.h"

#include <dlfcn.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define FUNCTIONS(X)                                                                                          \
  X(uint32_t, abi_version, (void))                                                                            \
  X(const char *, version, (void))                                                                            \
  X(void, free, (struct sluice_tok_result *))                                                                 \
  X(int, load, (const char *, const struct sluice_tok_options *, struct sluice_tok_model **, struct sluice_tok_result *)) \
  X(void, close, (struct sluice_tok_model *))                                                                 \
  X(int, info, (const struct sluice_tok_model *, uint32_t, struct sluice_tok_result *))                       \
  X(int, render, (const struct sluice_tok_model *, const uint8_t *, size_t, const uint8_t *, size_t, uint64_t, struct sluice_tok_result *)) \
  X(int, encode, (const struct sluice_tok_model *, const uint8_t *, size_t, uint32_t, uint32_t *, size_t, struct sluice_tok_result *))

struct api {
#define X(result, name, args) result(*name) args;
  FUNCTIONS(X)
#undef X
};

static struct api table;
static char loaded_from[PATH_MAX];
static atomic_int loaded; /* stored after the table, so that a reader of 1 sees it whole */

static int fill(void *h, struct api *t, const char *file, char *why, size_t why_len) {
#define X(result, name, args)                                                           \
  if (!sluice_dl_symbol(h, "sluice_tok_" #name, &t->name)) {                            \
    snprintf(why, why_len, "%s lacks sluice_tok_" #name, file);                         \
    return SLUICE_LOAD_SYMBOL;                                                          \
  }
  FUNCTIONS(X)
#undef X
  uint32_t abi = t->abi_version();
  if (abi != SLUICE_TOK_ABI) {
    snprintf(why, why_len, "%s has ABI %u: want %d, of the same release as this binary", file, abi, SLUICE_TOK_ABI);
    return abi > SLUICE_TOK_ABI ? SLUICE_LOAD_TOO_NEW : SLUICE_LOAD_SYMBOL;
  }
  return SLUICE_LOAD_OK;
}

/* Runs in the loading thread, one at a time. */
static int load(const char *path, char *why, size_t why_len) {
  if (strchr(path, '/') != NULL && access(path, F_OK) != 0) {
    snprintf(why, why_len, "%s: no such file", path);
    return SLUICE_LOAD_ABSENT;
  }
  /* fastokens would start threads of its own; setenv of libc, because that is what it reads. */
  setenv("FASTOKENS_BPE_THREADS", "1", 0);
  (void)dlerror();
  void *h = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (h == NULL) {
    const char *e = dlerror();
    snprintf(why, why_len, "%s", e != NULL ? e : "dlopen failed without a reason");
    return strchr(path, '/') == NULL && strncmp(why, path, strlen(path)) == 0 ? SLUICE_LOAD_ABSENT : SLUICE_LOAD_BROKEN;
  }
  char file[PATH_MAX], soname[256];
  sluice_dl_identify(h, file, sizeof file, soname, sizeof soname);
  if (atomic_load(&loaded)) {
    snprintf(why, why_len, "%s", loaded_from);
    if (strcmp(file, loaded_from) == 0) {
      return SLUICE_LOAD_OK;
    }
    snprintf(why, why_len, "%s is loaded already; a process can use one", loaded_from);
    return SLUICE_LOAD_OTHER;
  }
  struct api t;
  memset(&t, 0, sizeof t);
  int code = fill(h, &t, file, why, why_len);
  if (code != SLUICE_LOAD_OK) {
    dlclose(h);
    return code;
  }
  table = t;
  snprintf(loaded_from, sizeof loaded_from, "%s", file);
  atomic_store(&loaded, 1);
  snprintf(why, why_len, "%s", file);
  return SLUICE_LOAD_OK;
}

int sluice_tokenizer_load(const char *path, char *why, size_t why_len) {
  if (path == NULL || path[0] == '\0' || why == NULL || why_len == 0) {
    return SLUICE_LOAD_BROKEN;
  }
  why[0] = '\0';
  return sluice_dl_load_in_thread(load, path, why, why_len);
}

const char *sluice_tokenizer_version(void) { return table.version(); }

int sluice_tokenizer_open_model(const char *dir, const struct sluice_tok_options *options, struct sluice_tok_model **model,
                                struct sluice_tok_result *out) {
  return table.load(dir, options, model, out);
}

void sluice_tokenizer_close_model(struct sluice_tok_model *model) { table.close(model); }

int sluice_tokenizer_info(const struct sluice_tok_model *model, uint32_t what, struct sluice_tok_result *out) {
  return table.info(model, what, out);
}

int sluice_tokenizer_render(const struct sluice_tok_model *model, const uint8_t *template_text, size_t template_len,
                            const uint8_t *input, size_t input_len, uint64_t timeout_ns, struct sluice_tok_result *out) {
  return table.render(model, template_text, template_len, input, input_len, timeout_ns, out);
}

int sluice_tokenizer_encode(const struct sluice_tok_model *model, const uint8_t *text, size_t text_len, uint32_t flags,
                            uint32_t *dst, size_t dst_cap, struct sluice_tok_result *out) {
  return table.encode(model, text, text_len, flags, dst, dst_cap, out);
}

void sluice_tokenizer_free(struct sluice_tok_result *r) { table.free(r); }
