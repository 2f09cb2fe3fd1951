//! The two encoders: Hugging Face's tokenizers, which defines what is right, and
//! fastokens, which is several times as fast on byte-pair models and is used only for a
//! model for which it gives the same ids.

use std::cell::RefCell;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokenizers::Tokenizer;

use crate::error::{Code, Error, Result};

pub enum Encoder {
    Reference(Box<Tokenizer>),
    Fast(Box<fastokens::Tokenizer>),
}

impl Encoder {
    /// Chooses the encoder of a model. text is its tokenizer.json; plain says that the
    /// tokenizer is as that file describes it.
    pub fn choose(reference: Tokenizer, text: &[u8], plain: bool) -> Encoder {
        if plain && let Some(fast) = fast(&reference, text) {
            return Encoder::Fast(Box::new(fast));
        }
        Encoder::Reference(Box::new(reference))
    }

    pub fn name(&self) -> &'static str {
        match self {
            Encoder::Reference(_) => "tokenizers",
            Encoder::Fast(_) => "fastokens",
        }
    }

    /// Encodes a text. admit lets a thread encode that may not otherwise.
    pub fn encode(&self, text: &str, add_special: bool, admit: bool) -> Result<Vec<u32>> {
        self.check_cost(text)?;
        if matches!(self, Encoder::Fast(_)) && !admitted(admit) {
            return Err(Error::new(Code::Thread, "too many threads have encoded"));
        }
        match self {
            Encoder::Reference(t) => reference_ids(t, text, add_special),
            Encoder::Fast(t) => t
                .encode_with_special_tokens(text, add_special)
                .map_err(|e| Error::new(Code::Input, format!("cannot encode the text: {e}"))),
        }
    }
}

impl Encoder {
    /// Refuses a text that would take too long: neither encoder can be interrupted.
    fn check_cost(&self, text: &str) -> Result<()> {
        if matches!(self, Encoder::Reference(_)) && text.len() > MAX_REFERENCE {
            return Err(Error::new(Code::Limit, format!("the text has {} bytes; at most {MAX_REFERENCE} are encoded with tokenizers", text.len())));
        }
        if longest_run(text) > MAX_RUN {
            return Err(Error::new(Code::Limit, format!("the text has more than {MAX_RUN} bytes in a row that are all letters, all white space or all neither")));
        }
        Ok(())
    }
}

/// The longest text for Hugging Face's tokenizers, in bytes: each takes 140 bytes of memory.
const MAX_REFERENCE: usize = 1 << 20;

/// The longest run of characters of one class, in bytes. Pre-tokenizers split a text where
/// the class changes, and merging takes time and memory by the length of the longest piece.
const MAX_RUN: usize = 256 << 10;

/// The bytes of the longest run of letters, of white space, or of other characters.
fn longest_run(text: &str) -> usize {
    if text.len() <= MAX_RUN {
        return 0;
    }
    let class = |c: char| {
        if c.is_whitespace() {
            0
        } else if c.is_alphabetic() {
            1
        } else {
            2
        }
    };
    let (mut longest, mut from, mut last) = (0, 0, 3);
    for (i, c) in text.char_indices() {
        let now = class(c);
        if now != last {
            longest = longest.max(i - from);
            (from, last) = (i, now);
        }
    }
    longest.max(text.len() - from)
}

/// The threads that have encoded, and how many may. fastokens keeps words in memory of
/// the thread, so their number bounds its memory.
static THREADS: AtomicUsize = AtomicUsize::new(0);
const MAX_THREADS: usize = 16;

/// A thread's place among those that have encoded, until it ends.
struct Place;

impl Drop for Place {
    fn drop(&mut self) {
        THREADS.fetch_sub(1, Ordering::Relaxed);
    }
}

thread_local! {
    static PLACE: RefCell<Option<Place>> = const { RefCell::new(None) };
}

fn admitted(admit: bool) -> bool {
    PLACE.with_borrow_mut(|place| {
        if place.is_some() {
            return true;
        }
        if THREADS.fetch_add(1, Ordering::Relaxed) >= MAX_THREADS && !admit {
            THREADS.fetch_sub(1, Ordering::Relaxed);
            return false;
        }
        *place = Some(Place);
        true
    })
}

fn reference_ids(t: &Tokenizer, text: &str, add_special: bool) -> Result<Vec<u32>> {
    t.encode_fast(text, add_special)
        .map(|e| e.get_ids().to_vec())
        .map_err(|e| Error::new(Code::Input, format!("cannot encode the text: {e}")))
}

/// Loads the fast encoder if it gives the same ids for every probe.
fn fast(reference: &Tokenizer, text: &[u8]) -> Option<fastokens::Tokenizer> {
    if !matches!(reference.get_model(), tokenizers::models::ModelWrapper::BPE(_)) {
        return None;
    }
    let mut json: serde_json::Value = serde_json::from_slice(text).ok()?;
    json["truncation"] = serde_json::Value::Null;
    json["padding"] = serde_json::Value::Null;
    let fast = fastokens::Tokenizer::from_json(json).ok()?;
    let equal = |text: &str| {
        [false, true].iter().all(|special| {
            fast.encode_with_special_tokens(text, *special).ok() == reference_ids(reference, text, *special).ok()
        })
    };
    probes(reference).iter().all(|p| equal(p)).then_some(fast)
}

/// Texts that are hard for pre-tokenizers, and the model's added tokens among them.
fn probes(reference: &Tokenizer) -> Vec<String> {
    let pieces = [
        "", " ", "  ", "\n", "\n\n", " \n", "\r\n", "\t", "\u{a0}", "\u{3000}", "\u{200b}", "a", "Hello", " World", "HELLO", "hELLO", "'s", "'LL", "'re x", "don't", "’s", "1", "12", "1234567",
        "3.14", "x1y2", "_", "__init__", "()", " {", "};\n", "!!!", " ...", "#", "=>", "é", "E\u{301}", "ñandú", "Straße", "ΑΒΓδ", "ПРИВЕТ", "привет ", "漢字", "かな", "カナ", "한국어", "\u{1100}\u{1161}",
        "🙂", "👩‍👩‍👧", "🇩🇪", "a\u{300}\u{301}", "עברית", "عربى", "हिन्दी", "ไทย", "ǅ", "ſ", "K", "Å", "\u{fffd}", "\u{0}", "\u{7f}", "\u{85}", "\u{2028}", "\u{1d400}", "½", "²", "Ⅷ", "٣", "१२", "▁", "▁▁a", "<", ">", "|",
        "\u{e000}", "\u{10ffff}", "\u{ad}", "\u{300}", "…", "“q”", "—", "a\u{a0}b", "http://a.b/c?d=e&f", "C:\\x",
    ];
    let mut added: Vec<String> = reference.get_added_tokens_decoder().into_values().map(|t| t.content).collect();
    added.sort();
    let all: Vec<&str> = pieces.iter().copied().chain(added.iter().map(String::as_str).take(64)).collect();
    let mut out: Vec<String> = all.iter().map(|s| s.to_string()).collect();
    // Every piece beside others, in an order that depends on nothing but the seed.
    let mut seed = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = |n: usize| {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        (seed % n as u64) as usize
    };
    for _ in 0..400 {
        let n = 2 + next(24);
        out.push((0..n).map(|_| all[next(all.len())]).collect());
    }
    for unit in [" ", "\n", "a", "1", "=-", " \n", "漢", "🙂", "ab1 "] {
        for n in [3, 17, 100, 5000] {
            out.push(unit.repeat(n));
            out.push(unit.repeat(n) + "a");
        }
    }
    out
}
