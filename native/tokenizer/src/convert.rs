//! tokenizer.json for folders that have none: from tiktoken's ranks and Mistral's tekken.json.
//! Each becomes a byte-pair model of Hugging Face's tokenizers that gives the ids of the program
//! that reads the file in the engines (scripts/tokenizer_golden.py files).
//!
//! SentencePiece models are left out: of two pairs that give the same piece SentencePiece merges
//! the leftmost, which the list of merges cannot say.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use serde_json::{Value as Json, json};

use crate::error::{Code, Error, Result};
use crate::model::{read, read_json};

/// A tokenizer that was made from another file.
pub struct Converted {
    /// Its tokenizer.json.
    pub spec: Json,
    /// "tekken" or "tiktoken".
    pub format: &'static str,
    /// The file that it was made from.
    pub file: PathBuf,
    /// What its program encodes in pieces of this size is refused, if longer.
    pub runs: Option<Runs>,
}

/// The bounds beyond which a program cuts a text before it encodes it: characters of the
/// text, and characters in a row that are all white space or all not.
#[derive(Clone, Copy)]
pub struct Runs {
    pub text: usize,
    pub run: usize,
}

/// Of Kimi's tokenization_kimi.py (TIKTOKEN_MAX_ENCODE_CHARS, MAX_NO_WHITESPACES_CHARS).
const KIMI_RUNS: Runs = Runs { text: 400_000, run: 25_000 };

/// The most tokens of a vocabulary.
const MAX_TOKENS: usize = 4 << 20;

/// The longest token.
const MAX_TOKEN: usize = 64 << 10;

impl Runs {
    /// Reports whether the program encodes the text as a whole.
    pub fn whole(&self, text: &str) -> bool {
        if text.len() <= self.run {
            return true;
        }
        let (mut length, mut chars, mut space) = (0, 0, false);
        for c in text.chars() {
            chars += 1;
            // str.isspace of Python also holds for four control characters.
            let now = c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c);
            length = if now == space { length + 1 } else { 1 };
            space = now;
            if length > self.run || chars > self.text {
                return false;
            }
        }
        true
    }
}

fn unsupported(file: &Path, why: impl std::fmt::Display) -> Error {
    Error::new(Code::Unsupported, format!("{}: {why}", file.display()))
}

/// Converts the vocabulary of a folder without tokenizer.json. It returns None if there is
/// no file of a known format.
pub fn convert(dir: &Path, config: &Json) -> Result<Option<Converted>> {
    let tekken = dir.join("tekken.json");
    if tekken.exists() {
        let spec = from_tekken(&tekken, &read_json(dir, "tekken.json")?)?;
        return Ok(Some(Converted { spec, format: "tekken", file: tekken, runs: None }));
    }
    for name in ["tiktoken.model", "qwen.tiktoken"] {
        let file = dir.join(name);
        if let Some(text) = read(&file)? {
            let (spec, runs) = from_tiktoken(&file, &text, config)?;
            return Ok(Some(Converted { spec, format: "tiktoken", file, runs }));
        }
    }
    Ok(None)
}

/// The character that byte-level models of Hugging Face write for a byte.
pub fn byte_chars() -> [char; 256] {
    let mut chars = ['\0'; 256];
    let mut next = 256;
    for b in 0..=255u8 {
        chars[b as usize] = match b {
            b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff => b as char,
            _ => {
                next += 1;
                char::from_u32(next - 1).unwrap_or('\0')
            }
        };
    }
    chars
}

/// A byte-pair model from tokens and their ranks, which are their order of merging.
/// offset is added to a rank to give the id.
fn byte_pairs(file: &Path, tokens: &[(Vec<u8>, u32)], offset: u32) -> Result<Json> {
    let ranks: HashMap<&[u8], u32> = tokens.iter().map(|(t, r)| (t.as_slice(), *r)).collect();
    if ranks.len() != tokens.len() {
        return Err(unsupported(file, "a token occurs twice"));
    }
    for b in 0..=255u8 {
        if !ranks.contains_key(&[b][..]) {
            return Err(unsupported(file, format!("the byte {b:#04x} is not a token")));
        }
    }
    let chars = byte_chars();
    let spell = |t: &[u8]| -> String { t.iter().map(|b| chars[*b as usize]).collect() };
    let mut vocab = serde_json::Map::with_capacity(tokens.len());
    let mut merges: Vec<(u32, &[u8], &[u8])> = Vec::with_capacity(tokens.len());
    for (token, rank) in tokens {
        vocab.insert(spell(token), json!(rank + offset));
        if token.len() == 1 {
            continue;
        }
        let parts = split_below(token, *rank, &ranks);
        if let [a, b] = parts[..] {
            merges.push((*rank, a, b));
            continue;
        }
        // Merges of later tokens lead to it, if any do.
        for i in 1..token.len() {
            let (a, b) = token.split_at(i);
            if ranks.contains_key(a) && ranks.contains_key(b) {
                merges.push((*rank, a, b));
            }
        }
    }
    merges.sort_by_key(|m| m.0);
    let merges: Vec<Json> = merges.iter().map(|(_, a, b)| json!([spell(a), spell(b)])).collect();
    Ok(json!({
        "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null, "end_of_word_suffix": null,
        "fuse_unk": false, "byte_fallback": false,
        // A piece that is a token is that token, whatever its merges would give.
        "ignore_merges": true,
        "vocab": vocab, "merges": merges,
    }))
}

/// The parts of a token after all merges with a rank below its own.
fn split_below<'a>(token: &'a [u8], rank: u32, ranks: &HashMap<&[u8], u32>) -> Vec<&'a [u8]> {
    let mut bounds: Vec<usize> = (0..=token.len()).collect();
    loop {
        let best = (0..bounds.len().saturating_sub(2))
            .filter_map(|i| Some((*ranks.get(&token[bounds[i]..bounds[i + 2]])?, i)))
            .filter(|(r, _)| *r < rank)
            .min();
        let Some((_, i)) = best else { break };
        bounds.remove(i + 1);
    }
    bounds.windows(2).map(|w| &token[w[0]..w[1]]).collect()
}

fn decode_base64(text: &[u8]) -> Option<Vec<u8>> {
    let text = text.strip_suffix(b"==").or_else(|| text.strip_suffix(b"=")).unwrap_or(text);
    let mut out = Vec::with_capacity(text.len() * 3 / 4);
    let (mut bits, mut n) = (0u32, 0);
    for c in text {
        let v = match c {
            b'A'..=b'Z' => c - b'A',
            b'a'..=b'z' => c - b'a' + 26,
            b'0'..=b'9' => c - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => return None,
        };
        bits = bits << 6 | u32::from(v);
        n += 6;
        if n >= 8 {
            n -= 8;
            out.push((bits >> n) as u8);
        }
    }
    (!out.is_empty() && out.len() <= MAX_TOKEN).then_some(out)
}

fn whole(model: Json, normalizer: Json, pattern: &str, added: Vec<Json>, post_processor: Json) -> Json {
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false},
            {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
        ]},
        "post_processor": post_processor, "decoder": null, "model": model,
    })
}

/// Puts a token before a text where special tokens are asked for.
fn begin_with(token: &str, id: u32) -> Json {
    json!({
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {token: {"id": token, "ids": [id], "tokens": [token]}},
    })
}

/// Mistral's format (mistral_common 1.13, tokens/tokenizers/tekken.py). Ids are ranks after
/// the special tokens, none of which is found in a text.
fn from_tekken(file: &Path, t: &Json) -> Result<Json> {
    let config = &t["config"];
    let number = |name: &str| config[name].as_u64().filter(|n| *n <= MAX_TOKENS as u64).ok_or_else(|| unsupported(file, format!("config.{name} is not a number of tokens")));
    let (size, special) = (number("default_vocab_size")?, number("default_num_special_tokens")?);
    let pattern = config["pattern"].as_str().ok_or_else(|| unsupported(file, "config.pattern is not a string"))?;
    let list = t["vocab"].as_array().ok_or_else(|| unsupported(file, "vocab is not a list"))?;
    let ordinary = size.checked_sub(special).filter(|n| *n <= list.len() as u64).ok_or_else(|| unsupported(file, "the vocabulary has fewer tokens than config says"))?;
    let mut tokens = Vec::with_capacity(ordinary as usize);
    for (i, v) in list.iter().take(ordinary as usize).enumerate() {
        let bytes = v["token_bytes"].as_str().and_then(|s| decode_base64(s.as_bytes()));
        match (bytes, v["rank"].as_u64()) {
            (Some(b), Some(r)) if r == i as u64 => tokens.push((b, i as u32)),
            _ => return Err(unsupported(file, format!("vocab[{i}] is not a token of rank {i}"))),
        }
    }
    // Files before version 8 name no special tokens; the second one is "<s>".
    let begin = match t["special_tokens"].as_array() {
        None => 1,
        Some(list) => list
            .iter()
            .find(|s| s["token_str"] == "<s>")
            .and_then(|s| s["rank"].as_u64())
            .filter(|r| *r < special)
            .ok_or_else(|| unsupported(file, "special_tokens has no <s>"))?,
    };
    Ok(whole(byte_pairs(file, &tokens, special as u32)?, Json::Null, pattern, Vec::new(), begin_with("<s>", begin as u32)))
}

/// The pattern of Qwen's first models (tokenization_qwen.py) and of Kimi's (tokenization_kimi.py).
const QWEN: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// What a model's own Python module says about its tiktoken file.
fn from_tiktoken(file: &Path, text: &[u8], config: &Json) -> Result<(Json, Option<Runs>)> {
    let mut tokens = Vec::new();
    for (i, line) in text.split(|b| *b == b'\n').enumerate() {
        let line = line.trim_ascii();
        if line.is_empty() {
            continue;
        }
        let mut fields = line.split(|b| *b == b' ');
        let token = fields.next().and_then(decode_base64);
        let rank = fields.next().and_then(|f| std::str::from_utf8(f).ok()).and_then(|f| f.parse::<u32>().ok());
        match (token, rank) {
            (Some(t), Some(r)) if (r as usize) < MAX_TOKENS && tokens.len() < MAX_TOKENS => tokens.push((t, r)),
            _ => return Err(unsupported(file, format!("line {} is not a token with its rank", i + 1))),
        }
    }
    let map = &config["auto_map"]["AutoTokenizer"];
    let module = map.as_str().or_else(|| map[0].as_str()).unwrap_or_default().split('.').next().unwrap_or_default();
    // A class comes from a repository as REPOSITORY--MODULE.
    let module = module.rsplit("--").next().unwrap_or_default();
    let first = tokens.len() as u32;
    let token = |id: u32, content: &str, flags: &Json| {
        let is = |name: &str, absent: bool| flags[name].as_bool().unwrap_or(absent);
        json!({"id": id, "content": content, "single_word": is("single_word", false), "lstrip": is("lstrip", false), "rstrip": is("rstrip", false), "normalized": false, "special": is("special", true)})
    };
    match module {
        "tokenization_kimi" => {
            let declared = &config["added_tokens_decoder"];
            let last = first + fastokens::KIMI_RESERVED_SPECIAL_TOKENS;
            let added = (first..last)
                .map(|id| {
                    let d = &declared[id.to_string()];
                    match d["content"].as_str() {
                        Some(content) => token(id, content, d),
                        None => token(id, &format!("<|reserved_token_{id}|>"), &Json::Null),
                    }
                })
                .collect();
            Ok((whole(byte_pairs(file, &tokens, 0)?, Json::Null, fastokens::KIMI_PATTERN, added, Json::Null), Some(KIMI_RUNS)))
        }
        "tokenization_qwen" => {
            let names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"].map(str::to_string).into_iter().chain((0..205).map(|i| format!("<|extra_{i}|>")));
            let added = names.enumerate().map(|(i, name)| token(first + i as u32, &name, &Json::Null)).collect();
            Ok((whole(byte_pairs(file, &tokens, 0)?, json!({"type": "NFC"}), QWEN, added, Json::Null), None))
        }
        _ => Err(unsupported(file, format!("auto_map.AutoTokenizer of tokenizer_config.json is in {module:?}; want tokenization_kimi or tokenization_qwen, whose patterns are known"))),
    }
}
