//! What transformers makes of a folder's tokenizer.json.
//!
//! The class of a tokenizer decides: some take the file as it is, others take vocabulary, merges and
//! post-processor from it and build normalizer and pre-tokenizer themselves (transformers 5,
//! TokenizersBackend.convert_to_native_format). A folder is loaded here only if both are the same; the
//! others are left to the engines. So a folder is loaded or not whichever release the engine has.
//! `scripts/tokenizer_golden.py classes` compares with transformers, and writes classes.json.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Value as Json, json};
use tokenizers::models::ModelWrapper;
use tokenizers::{AddedToken, NormalizerWrapper, PreTokenizerWrapper, Tokenizer};

use crate::error::{Code, Error, Result};
use crate::model::{read_json, token_text};

/// The class of each model type, the types whose folders name a wrong one, and the classes that take
/// tokenizer.json as it is, of transformers.
const CLASSES: &str = include_str!("classes.json");

/// The named special tokens of every tokenizer, in the order of transformers.
pub const SPECIAL: [&str; 7] = ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// A class that builds its own stages, for one folder.
struct Rebuilt {
    normalizer: Json,
    pre_tokenizer: Json,
    byte_fallback: bool,
    fuse_unk: bool,
    unk: Option<String>,
    /// Special tokens that are not in the folder.
    defaults: &'static [(&'static str, &'static str)],
    /// Nothing is added to a text, whatever the file's post-processor adds.
    adds_nothing: bool,
}

/// What the files say of the special tokens.
pub struct Special {
    /// By name, as templates see them.
    pub named: Vec<(String, String)>,
    /// Without a name.
    extra: Vec<String>,
}

fn refuse(why: impl Into<String>) -> Error {
    Error::new(Code::Unsupported, why)
}

/// Removes the ending by which names of classes differ without a difference.
fn plain(class: &str) -> &str {
    class.strip_suffix("Fast").unwrap_or(class)
}

/// The class that transformers chooses (AutoTokenizer.from_pretrained), "" for its general one.
fn class_of(config: &Json, model: &Json, table: &Json) -> String {
    let given = config["tokenizer_class"].as_str().or_else(|| model["tokenizer_class"].as_str()).filter(|c| !c.is_empty());
    let kind = model["model_type"].as_str().unwrap_or_default();
    let registered = table["model_types"][kind].as_str();
    let general = |c: &str| c == "TokenizersBackend" || c == "MistralCommonBackend";
    match (given, registered) {
        (Some(given), Some(known)) if plain(given) != plain(known) => {
            let listed = |name: &Json| table["incorrect"].as_array().is_some_and(|all| all.contains(name));
            if general(known) {
                String::new()
            } else if listed(&model["model_type"]) || listed(&model["model_name"]) {
                plain(known).to_string()
            } else {
                plain(given).to_string()
            }
        }
        (Some(name), _) | (None, Some(name)) if !general(name) => plain(name).to_string(),
        _ => String::new(),
    }
}

/// The stages that a class builds; None if they are not known here.
fn rebuilt(class: &str, config: &Json) -> Option<Rebuilt> {
    let prefix = |default: bool| config["add_prefix_space"].as_bool().unwrap_or(default);
    let nfc = json!({"type": "NFC"});
    let bytes = |prefix: bool, regex: bool| json!({"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": true, "use_regex": regex});
    let sequence = |first: Json, second: Json| json!({"type": "Sequence", "pretokenizers": [first, second]});
    let split = |pattern: &str| json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false});
    let base = Rebuilt {
        normalizer: Json::Null,
        pre_tokenizer: Json::Null,
        byte_fallback: false,
        fuse_unk: false,
        unk: None,
        defaults: &[],
        adds_nothing: false,
    };
    const END: &str = "<|endoftext|>";
    Some(match class {
        "Qwen2Tokenizer" | "Qwen3_5Tokenizer" => {
            let letters = if class == "Qwen2Tokenizer" { r"\p{L}" } else { r"\p{L}\p{M}" };
            let word = if class == "Qwen2Tokenizer" { r"\p{L}+" } else { r"[\p{L}\p{M}]+" };
            let pattern = format!(
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?{word}|\p{{N}}| ?[^\s{letters}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            );
            Rebuilt {
                normalizer: nfc,
                pre_tokenizer: sequence(split(&pattern), bytes(prefix(false), false)),
                defaults: &[("unk_token", END), ("eos_token", END), ("pad_token", END)],
                ..base
            }
        }
        "GPT2Tokenizer" => Rebuilt {
            pre_tokenizer: bytes(prefix(false), true),
            defaults: &[("unk_token", END), ("bos_token", END), ("eos_token", END)],
            ..base
        },
        "GPTNeoXTokenizer" => Rebuilt {
            normalizer: nfc,
            pre_tokenizer: bytes(prefix(false), true),
            defaults: &[("unk_token", END), ("bos_token", END), ("eos_token", END), ("pad_token", "<|padding|>")],
            adds_nothing: true,
            ..base
        },
        "CohereTokenizer" => Rebuilt {
            normalizer: nfc,
            pre_tokenizer: sequence(json!({"type": "Digits", "individual_digits": true}), bytes(prefix(false), true)),
            defaults: &[
                ("unk_token", "<UNK>"), ("bos_token", "<BOS_TOKEN>"), ("eos_token", "<|END_OF_TURN_TOKEN|>"), ("pad_token", "<PAD>"),
                ("cls_token", "<CLS>"), ("sep_token", "<SEP>"), ("mask_token", "<MASK_TOKEN>"),
            ],
            ..base
        },
        "GemmaTokenizer" => Rebuilt {
            normalizer: json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"}),
            pre_tokenizer: json!({"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": false}),
            byte_fallback: true,
            fuse_unk: true,
            unk: Some(token_text(&config["unk_token"]).unwrap_or("<unk>").to_string()),
            defaults: &[("unk_token", "<unk>"), ("bos_token", "<bos>"), ("eos_token", "<eos>"), ("pad_token", "<pad>"), ("mask_token", "<mask>")],
            ..base
        },
        "LlamaTokenizer" => {
            let scheme = match (prefix(true), config["legacy"].as_bool().unwrap_or(false)) {
                (false, _) => "never",
                (true, true) => "always",
                (true, false) => "first",
            };
            Rebuilt {
                pre_tokenizer: json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": false}),
                byte_fallback: true,
                fuse_unk: true,
                defaults: &[("unk_token", "<unk>"), ("bos_token", "<s>"), ("eos_token", "</s>")],
                ..base
            }
        }
        _ => return None,
    })
}

/// Checks that an engine encodes with the folder's tokenizer.json as it is, and returns the special tokens.
/// t is the file, with the tokens of added_tokens_decoder.
pub fn check(dir: &Path, config: &Json, t: &Tokenizer, text: &[u8]) -> Result<Special> {
    let model = read_json(dir, "config.json")?;
    let table: Json = serde_json::from_str(CLASSES).map_err(|e| refuse(e.to_string()))?;
    let code = &config["auto_map"];
    if code.is_array() || !code["AutoTokenizer"].is_null() {
        return Err(refuse("tokenizer_config.json has auto_map: the engine may tokenize by the folder's own Python code"));
    }
    if config["split_special_tokens"].as_bool() == Some(true) {
        return Err(refuse("tokenizer_config.json has split_special_tokens: special tokens are not found in texts"));
    }
    if config["fast_tokenizer_files"].as_array().is_some_and(|files| files.iter().any(|f| f != "tokenizer.json")) {
        return Err(refuse("tokenizer_config.json has fast_tokenizer_files: the release of transformers decides which one is read"));
    }
    let class = class_of(config, &model, &table);
    let as_is = class.is_empty() || table["as_is"].as_array().is_some_and(|all| all.iter().any(|c| *c == *class));
    let rules = if as_is {
        None
    } else {
        let Some(r) = rebuilt(&class, config) else {
            return Err(refuse(format!("the tokenizer class {class} can give other ids than tokenizer.json, and its rules are not known here")));
        };
        if let Some(what) = difference(t, &r) {
            return Err(refuse(format!("the tokenizer class {class} replaces the {what} of tokenizer.json by another")));
        }
        Some(r)
    };
    let special = special_tokens(dir, config, rules.as_ref().map_or(&[], |r| r.defaults))?;
    let added: BTreeMap<String, (u32, AddedToken)> = t.get_added_tokens_decoder().into_iter().map(|(id, a)| (a.content.clone(), (id, a))).collect();
    for name in special.named.iter().map(|(_, v)| v).chain(&special.extra).filter(|name| !name.is_empty()) {
        match added.get(name) {
            None => return Err(refuse(format!("transformers adds the special token {}, which is not an added token of tokenizer.json", shown(name)))),
            Some((_, a)) if rules.is_some() && (!a.special || a.normalized || a.lstrip || a.rstrip || a.single_word) => {
                return Err(refuse(format!("the tokenizer class {class} replaces the properties of the special token {}", shown(name))));
            }
            _ => {}
        }
    }
    let decoder = config["added_tokens_decoder"].as_object();
    if decoder.is_none() {
        // Older folders list added tokens here. What tokenizer.json says of an id replaces it.
        for (token, id) in read_json(dir, "added_tokens.json")?.as_object().into_iter().flatten() {
            if added.get(token).is_none_or(|(have, _)| id.as_u64() != Some(*have as u64)) {
                return Err(refuse(format!("transformers adds the token {} of added_tokens.json, which is not an added token of tokenizer.json", shown(token))));
            }
        }
    }
    if rules.is_some() {
        check_added(&class, &added, decoder, text)?;
    }
    Ok(special)
}

/// Checks that the added tokens are those of the list from which a class that builds its own stages takes
/// them: added_tokens_decoder, or without that tokenizer.json.
fn check_added(class: &str, added: &BTreeMap<String, (u32, AddedToken)>, decoder: Option<&serde_json::Map<String, Json>>, text: &[u8]) -> Result<()> {
    let mut list: Vec<(Option<u32>, Option<AddedToken>)> = Vec::new();
    let token = |v: &Json| serde_json::from_value(v.clone()).ok();
    match decoder {
        Some(all) => list.extend(all.iter().map(|(id, v)| (id.parse().ok(), token(v)))),
        None => {
            let file: Json = serde_json::from_slice(text).map_err(|e| refuse(e.to_string()))?;
            list.extend(file["added_tokens"].as_array().into_iter().flatten().map(|v| (v["id"].as_u64().map(|id| id as u32), token(v))));
        }
    }
    let mut seen = 0;
    for (id, token) in &list {
        let same = token.as_ref().and_then(|t| added.get(&t.content)).is_some_and(|(have, a)| Some(*have) == *id && Some(a) == token.as_ref());
        if !same {
            return Err(refuse(format!("the tokenizer class {class} gives the added tokens other ids or properties than tokenizer.json")));
        }
        seen += 1;
    }
    if seen != added.len() {
        return Err(refuse(format!("the tokenizer class {class} knows {seen} added tokens, tokenizer.json {}", added.len())));
    }
    Ok(())
}

/// A token as a message shows it.
fn shown(token: &str) -> String {
    format!("{:?}", token.chars().take(64).collect::<String>())
}

/// A stage with all of its members.
macro_rules! normal {
    ($kind:ty, $stage:expr) => {
        serde_json::from_value::<$kind>($stage.clone()).ok().and_then(|s| serde_json::to_value(s).ok()).unwrap_or(json!("unknown"))
    };
}

/// What is not as the class builds it.
fn difference(t: &Tokenizer, want: &Rebuilt) -> Option<&'static str> {
    let ModelWrapper::BPE(m) = t.get_model() else { return Some("model") };
    let none = |v: &Option<String>| v.as_deref().unwrap_or_default().is_empty();
    if m.dropout.is_some() || m.ignore_merges || m.byte_fallback != want.byte_fallback || !none(&m.continuing_subword_prefix) || !none(&m.end_of_word_suffix) {
        return Some("model's options");
    }
    // Where every byte has a token, none is unknown.
    if !has_bytes(t, want.byte_fallback) && (m.fuse_unk != want.fuse_unk || m.unk_token != want.unk) {
        return Some("model's options");
    }
    let normalizer = t.get_normalizer().map(|n| serde_json::to_value(n).unwrap_or_default()).unwrap_or_default();
    let wanted = if want.normalizer.is_null() { Json::Null } else { normal!(NormalizerWrapper, want.normalizer) };
    if normalizer != wanted {
        return Some("normalizer");
    }
    let pre = t.get_pre_tokenizer().map(|p| serde_json::to_value(p).unwrap_or_default()).unwrap_or_default();
    if without_offsets(pre) != without_offsets(normal!(PreTokenizerWrapper, want.pre_tokenizer)) {
        return Some("pre-tokenizer");
    }
    if want.adds_nothing && t.encode_fast("", true).map_or(true, |e| !e.get_ids().is_empty()) {
        return Some("post-processor");
    }
    None
}

/// Reports whether each byte has a token of the model.
fn has_bytes(t: &Tokenizer, fallback: bool) -> bool {
    let chars = crate::convert::byte_chars();
    (0..=255u8).all(|b| {
        let name = if fallback { format!("<0x{b:02X}>") } else { chars[b as usize].to_string() };
        t.token_to_id(&name).is_some()
    })
}

/// Drops what changes offsets and no ids.
fn without_offsets(mut v: Json) -> Json {
    match &mut v {
        Json::Object(o) => {
            o.remove("trim_offsets");
            for (_, member) in o.iter_mut() {
                *member = without_offsets(member.take());
            }
        }
        Json::Array(a) => a.iter_mut().for_each(|member| *member = without_offsets(member.take())),
        _ => {}
    }
    v
}

/// The special tokens of a folder (PreTrainedTokenizerBase._from_pretrained): those of tokenizer_config.json,
/// and of special_tokens_map.json if the former has no added_tokens_decoder.
pub fn special_tokens(dir: &Path, config: &Json, defaults: &[(&str, &str)]) -> Result<Special> {
    let mut members = config.as_object().cloned().unwrap_or_default();
    let mut extra: Vec<String> = Vec::new();
    let mut add = |v: &Json, named: &mut Vec<(String, String)>| match v {
        Json::Array(list) => extra.extend(list.iter().filter_map(token_text).map(String::from)),
        Json::Object(map) => named.extend(map.iter().filter_map(|(k, v)| Some((k.clone(), token_text(v)?.to_string())))),
        _ => {}
    };
    let mut more = Vec::new();
    // Tokens of both lists are taken, where transformers takes those of one: a superset has to be known.
    for key in ["additional_special_tokens", "extra_special_tokens"] {
        add(&config[key], &mut more);
    }
    if config["added_tokens_decoder"].is_null() {
        for (key, v) in read_json(dir, "special_tokens_map.json")?.as_object().into_iter().flatten() {
            if key == "additional_special_tokens" || key == "extra_special_tokens" {
                add(v, &mut more);
            } else {
                members.insert(key.clone(), v.clone());
            }
        }
    }
    let mut named = Vec::new();
    for name in SPECIAL {
        let given = members.get(name);
        let default = || defaults.iter().find(|(k, _)| *k == name).map(|(_, v)| *v);
        if let Some(text) = given.map_or_else(default, |v| token_text(v)) {
            named.push((name.to_string(), text.to_string()));
        }
    }
    for (key, v) in &members {
        if key.ends_with("_token") && !SPECIAL.contains(&key.as_str()) && let Some(text) = token_text(v) {
            named.push((key.clone(), text.to_string()));
        }
    }
    named.extend(more);
    Ok(Special { named, extra })
}
