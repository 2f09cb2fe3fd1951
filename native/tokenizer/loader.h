/* Opens libsluice_tokenizer and calls it. */
#ifndef SLUICE_TOKENIZER_LOADER_H
#define SLUICE_TOKENIZER_LOADER_H

#include "tokenizer/sluice_tokenizer.h"

/* Loads the library at path, or by the loader's own search if path has no slash. why
 * gets the reason of a failure, or the resolved file. A process has one copy: a second
 * path that names another file is SLUICE_LOAD_OTHER. Returns an enum sluice_load. */
int sluice_tokenizer_load(const char *path, char *why, size_t why_len);

/* The functions of the header through the loaded library. Each may be called only after
 * a successful load. */
const char *sluice_tokenizer_version(void);
int sluice_tokenizer_open_model(const char *dir, const struct sluice_tok_options *options, struct sluice_tok_model **model,
                                struct sluice_tok_result *out);
void sluice_tokenizer_close_model(struct sluice_tok_model *model);
int sluice_tokenizer_info(const struct sluice_tok_model *model, uint32_t what, struct sluice_tok_result *out);
int sluice_tokenizer_render(const struct sluice_tok_model *model, const uint8_t *template_text, size_t template_len,
                            const uint8_t *input, size_t input_len, uint64_t timeout_ns, struct sluice_tok_result *out);
int sluice_tokenizer_encode(const struct sluice_tok_model *model, const uint8_t *text, size_t text_len, uint32_t flags,
                            uint32_t *dst, size_t dst_cap, struct sluice_tok_result *out);
void sluice_tokenizer_free(struct sluice_tok_result *r);

#endif
