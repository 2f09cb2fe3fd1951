// Package incremental encodes the text of a prompt to token ids and encodes only what no earlier
// prompt began with.
//
// # The rule
//
// A Hugging Face tokenizer (tokenizers 0.23, AddedVocabulary.extract_and_normalize) first searches
// the text, as it is, for the added tokens that are not "normalized": leftmost first, of several at
// one place the longest, without overlap. The pieces between them then pass the normalizer, the
// search for the other added tokens, the pre-tokenizer and the model one by one. If every stage is
// a function of its piece alone, ids(a+b) = ids(a) + ids(b) wherever b begins with an added token
// that the search finds there both in a+b and in b, and does not find more in a alone.
//
// A boundary token is one for which that holds at each of its occurrences. Let T be an added token
// that is not normalized, and U any such token, T included. T is a boundary token if
//
//   - no U contains T, except U = T, and no proper suffix of a U is a prefix of T: nothing that the
//     search finds can cover a part of T's bytes unless it is T itself, in a+b, in a or in b;
//   - T is not a proper prefix of a U, so that the longest match at that place is T;
//   - T is not lstrip, so that T's match begins with its first byte. U may be rstrip or lstrip, and
//     so may T be rstrip: they take the spaces beside them, and T begins and ends with ASCII
//     punctuation, where they stop, in the text as at its end;
//   - T is not single_word, and its first and last bytes are not word characters either, so that
//     another token that is single_word finds a word boundary beside T as it does at an end of the
//     text.
//
// The text is cut before T, never after it: then no piece of b but T begins at offset 0, and
// Metaspace with prepend_scheme "first", which looks at that offset, treats a+b and b alike. A
// normalizer that prepends (Llama 2) and ByteLevel's add_prefix_space act on every piece in both.
//
// NewRules refuses a tokenizer with a stage that it does not know to be a function of its piece, or
// with a BPE dropout. What a post-processor adds at the ends of the text is kept apart from the
// ids of the text; one that does more, or truncation and padding, is refused too. Encoder.Check
// compares both with the model.
package incremental
