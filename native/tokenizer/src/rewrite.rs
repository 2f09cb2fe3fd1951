//! Changes the source of a template before minijinja compiles it: to what Jinja would make of it, and to
//! values that stay within the bounds of `bounds.rs`.

use minijinja::machinery::{Span, Token, Tokenizer};
use minijinja::syntax::SyntaxConfig;

use crate::bounds::{ATTRIBUTE, BOUND, EACH, FACTOR, INPUT, OPERAND, STEP};
use crate::error::{Code, Error, Result};
use crate::value::{DICT_METHODS, SUBSCRIPT};

/// Operators, calls, subscripts and filters of one tag. Each can nest the syntax tree by one level, which
/// the compiler walks recursively. Templates of real models have up to 60.
const MAX_OPERATORS: usize = 500;

/// Slices of one tag. minijinja makes none before it is read, so that a slice of slices takes time with the cube
/// of their number. Real templates have up to 3.
const MAX_SLICES: usize = 16;

/// The bounds are looked at before each operator `+` or `~` of a tag whose number this divides: looking takes as long
/// as joining two short texts, and so many long ones take some times the memory of a text that is kept.
const JOINED: usize = 8;

/// Brackets within brackets.
const MAX_BRACKETS: usize = 32;

/// `elif` of all the `if` around one place: each is nested in the one before. Real ones have up to 10.
const MAX_ELIFS: usize = 200;

/// Filters that make no large value, or look at the bounds themselves.
const LIGHT: [&str; 22] = [
    "abs", "attr", "bool", "count", "d", "default", "first", "float", "format", "indent", "int", "items", "join", "last", "length", "list", "pprint", "replace",
    "round", "string", "tojson", "trim",
];

/// What a macro begins with, between the end of its tag and the sign that may precede that end: a look at the clock,
/// since a macro that calls two others takes time that doubles with each.
const MACRO: &str = " %}{% if 0|__step %}{% endif ";

/// Refuses a template that nests or chains too much, and adds the filters of `bounds.rs` to the others.
pub fn rewrite(source: &str, name: &str, syntax: &SyntaxConfig) -> Result<String> {
    let mut r = Rewriter { source, out: String::with_capacity(source.len() + source.len() / 8), copied: 0, elifs: Vec::new(), elif_sum: 0, frames: Vec::new() };
    let mut tokens = Tokenizer::new(source, name, false, syntax.clone());
    let mut tag: Vec<(Token, Span)> = Vec::new();
    loop {
        match tokens.next_token().map_err(|e| Error::template(crate::render::describe(&e)))? {
            None => break,
            Some((Token::TemplateData(_), _)) => {}
            Some((Token::VariableStart | Token::BlockStart, _)) => tag.clear(),
            Some((Token::VariableEnd, at)) => {
                if source[at.start_offset as usize..].starts_with('+') {
                    return Err(Error::template("syntax error: an expression ends in a plus"));
                }
                r.tag(&tag, false)?;
            }
            Some((Token::BlockEnd, at)) => {
                r.tag(&tag, true)?;
                if let Some((Token::Ident("macro" | "call"), _)) = tag.first() {
                    r.insert(at.start_offset as usize, MACRO);
                }
            }
            Some(t) => tag.push(t),
        }
    }
    r.out.push_str(&source[r.copied..]);
    Ok(r.out)
}

struct Rewriter<'a> {
    source: &'a str,
    out: String,
    /// The bytes of source that are in out.
    copied: usize,
    /// The number of `elif` of each open `if`.
    elifs: Vec<usize>,
    elif_sum: usize,
    /// The open blocks that minijinja keeps a frame or a captured text for; true for a `for`.
    frames: Vec<bool>,
}

/// An open bracket of a tag.
struct Bracket {
    at: usize,
    is_literal: bool,
    is_call: bool,
    /// Where the current argument begins.
    arg: usize,
    commas: usize,
    colons: usize,
    /// Something that is not constant is inside.
    computed: bool,
}

impl Rewriter<'_> {
    fn tag(&mut self, t: &[(Token, Span)], is_block: bool) -> Result<()> {
        let word = |i: usize| match t.get(i) {
            Some((Token::Ident(w), _)) => *w,
            _ => "",
        };
        let first = if is_block { word(0) } else { "" };
        self.count_elifs(first)?;
        let (mut before, mut after) = (vec![0usize; t.len()], vec![Vec::<&str>::new(); t.len()]);
        macro_rules! wrap {
            ($from:expr, $to:expr, $filter:expr) => {{
                let (from, to): (usize, usize) = ($from, $to);
                if from < to {
                    before[from] += 1;
                    after[to - 1].push($filter);
                }
            }};
        }
        let mut open: Vec<Bracket> = Vec::new();
        let (mut operators, mut slices, mut joined) = (0, 0, 0);
        // Where the expression of a set, a for or a with begins, and whether the target is an attribute.
        let (mut value, mut dotted, mut piped) = (None, false, false);
        for i in 0..t.len() {
            let token = &t[i].0;
            let in_target = matches!(first, "set" | "for") && value.is_none();
            match token {
                Token::Ident("and" | "or" | "not" | "is" | "in" | "if" | "else") => operators += 1,
                Token::Plus | Token::Minus | Token::Mul | Token::Div | Token::FloorDiv | Token::Pow | Token::Mod | Token::Dot | Token::Tilde | Token::Pipe
                | Token::Eq | Token::Ne | Token::Gt | Token::Gte | Token::Lt | Token::Lte | Token::BracketOpen | Token::ParenOpen | Token::BraceOpen => operators += 1,
                _ => {}
            }
            if operators > MAX_OPERATORS {
                return Err(Error::template(format!("a tag has more than {MAX_OPERATORS} operators")));
            }
            match token {
                Token::Str(_) | Token::String(_) | Token::Int(_) | Token::Int128(_) | Token::Float(_) | Token::Comma | Token::Colon | Token::Minus
                | Token::BracketOpen | Token::BracketClose | Token::ParenClose | Token::BraceOpen | Token::BraceClose => {}
                Token::ParenOpen if !ends_operand(t, i) => {}
                _ => {
                    if let Some(b) = open.last_mut() {
                        b.computed = true;
                    }
                }
            }
            match token {
                Token::BracketOpen | Token::ParenOpen | Token::BraceOpen => {
                    let operand = ends_operand(t, i) || is_test_argument(t, i);
                    let is_call = operand && matches!(token, Token::ParenOpen);
                    open.push(Bracket { at: i, is_literal: !operand && !in_target, is_call, arg: i + 1, commas: 0, colons: 0, computed: false });
                    if open.len() > MAX_BRACKETS {
                        return Err(Error::template(format!("an expression has more than {MAX_BRACKETS} brackets in each other")));
                    }
                }
                Token::BracketClose | Token::ParenClose | Token::BraceClose => {
                    let Some(b) = open.pop() else { continue }; // the parser will complain
                    let assigned = matches!(t.get(i + 1), Some((Token::Assign, _)));
                    let is_value = !matches!(token, Token::ParenClose) || b.commas > 0;
                    if b.is_literal && b.computed && is_value && !assigned {
                        wrap!(b.at, i + 1, BOUND);
                    }
                    if b.is_call {
                        let (from, filter) = argument(t, b.arg, i);
                        wrap!(from, i * usize::from(filter), BOUND);
                    }
                    if b.colons > 0 && !b.is_literal {
                        slices += 1;
                        if slices > MAX_SLICES {
                            return Err(Error::template(format!("a tag has more than {MAX_SLICES} slices")));
                        }
                    }
                    if b.colons == 2 && !b.is_literal && b.arg < i {
                        wrap!(b.arg, i, STEP);
                    }
                    if let Some(outer) = open.last_mut() {
                        outer.computed |= b.computed;
                    }
                }
                Token::Comma => match open.last_mut() {
                    Some(b) => {
                        b.commas += 1;
                        if b.is_call {
                            let (from, filter) = argument(t, b.arg, i);
                            wrap!(from, i * usize::from(filter), BOUND);
                        }
                        b.arg = i + 1;
                    }
                    None if first == "with" => {
                        if let Some(from) = value.take() {
                            wrap!(from, i, BOUND);
                        }
                    }
                    None => {}
                },
                Token::Colon => {
                    if let Some(b) = open.last_mut() {
                        b.colons += 1;
                        b.arg = i + 1;
                    }
                }
                Token::Mul if i > 0 && !in_target && !matches!(t[i - 1].0, Token::ParenOpen | Token::Comma) => {
                    after[i - 1].push(FACTOR);
                    let end = operand_end(t, i + 1);
                    if end > i + 1 {
                        after[end - 1].push(FACTOR);
                    }
                }
                Token::Plus | Token::Tilde if !in_target && ends_operand(t, i) => {
                    joined += 1;
                    if joined % JOINED == 0 {
                        after[i - 1].push(OPERAND);
                    }
                }
                Token::Pipe if !in_target && ends_operand(t, i) && !LIGHT.contains(&word(i + 1)) => after[i - 1].push(INPUT),
                Token::Dot if in_target => dotted = true,
                Token::Pipe if in_target && open.is_empty() => piped = true,
                Token::Assign if open.is_empty() && value.is_none() && !piped && matches!(first, "set" | "with") => value = Some(i + 1),
                Token::Ident("in") if open.is_empty() && value.is_none() && first == "for" => value = Some(i + 1),
                Token::Ident("if" | "recursive") if open.is_empty() && first == "for" => {
                    if let Some(from) = value.filter(|from| *from < i) {
                        wrap!(from, i, EACH);
                        value = Some(t.len()); // the rest is the condition
                    }
                }
                _ => {}
            }
        }
        match (first, value) {
            ("set", Some(from)) if constant(&t[from..], dotted) => {}
            ("set", Some(from)) => wrap!(from, t.len(), if dotted { ATTRIBUTE } else { BOUND }),
            ("with", Some(from)) => wrap!(from, t.len(), BOUND),
            ("for", Some(from)) => wrap!(from, t.len(), EACH),
            // The filters of a block can make another value of its text.
            ("set", None) if piped => after[t.len() - 1].push(""),
            _ => {}
        }
        match first {
            "for" => self.frames.push(true),
            "with" | "filter" | "call" | "macro" | "block" | "autoescape" => self.frames.push(false),
            "generation" if t.len() == 1 => self.frames.push(false),
            "set" if value.is_none() => self.frames.push(false),
            "endfor" | "endwith" | "endfilter" | "endcall" | "endmacro" | "endblock" | "endautoescape" | "endset" | "endgeneration" => {
                self.frames.pop();
            }
            // minijinja jumps and leaves the frame, which is a panic later, or the captured text, which loses what follows.
            "continue" | "break" if self.frames.last() == Some(&false) => {
                return Err(Error::new(Code::Unsupported, format!("{first} within a block in a loop")));
            }
            _ => {}
        }
        for i in 0..t.len() {
            let (from, to) = (t[i].1.start_offset as usize, t[i].1.end_offset as usize);
            let block = match t[i].0 {
                // It only marks what the assistant wrote, in a scope of its own.
                Token::Ident("generation") if is_block && t.len() == 1 => "with",
                Token::Ident("endgeneration") if is_block && t.len() == 1 => "endwith",
                _ => "",
            };
            let method = is_method_subscript(t, i);
            if before[i] == 0 && after[i].is_empty() && block.is_empty() && !method {
                continue;
            }
            self.out.push_str(&self.source[self.copied..from]);
            self.out.extend(std::iter::repeat_n("((", before[i])); // a filter binds more tightly than an operator
            if method {
                self.out.push_str(&self.source[from..from + 1]);
                self.out.push(SUBSCRIPT);
                self.out.push_str(&self.source[from + 1..to]);
            } else if block.is_empty() {
                self.out.push_str(&self.source[from..to]);
            } else {
                self.out.push_str(block);
            }
            for filter in &after[i] {
                match *filter {
                    f @ (FACTOR | OPERAND | INPUT) => self.out.extend(["|", f]),
                    "" => self.out.extend(["|", ATTRIBUTE]),
                    f => self.out.extend([")|", f, ")"]),
                }
            }
            self.copied = to;
        }
        Ok(())
    }

    fn insert(&mut self, at: usize, text: &str) {
        self.out.push_str(&self.source[self.copied..at]);
        self.out.push_str(text);
        self.copied = at;
    }

    fn count_elifs(&mut self, word: &str) -> Result<()> {
        match word {
            "if" => self.elifs.push(0),
            "elif" => {
                if let Some(n) = self.elifs.last_mut() {
                    *n += 1;
                    self.elif_sum += 1;
                }
                if self.elif_sum > MAX_ELIFS {
                    return Err(Error::template(format!("more than {MAX_ELIFS} elif follow each other or are nested")));
                }
            }
            "endif" => self.elif_sum -= self.elifs.pop().unwrap_or(0),
            _ => {}
        }
        Ok(())
    }
}

/// Reports whether the token before i ends an operand, so that a bracket at i is a subscript or a call.
fn ends_operand(t: &[(Token, Span)], i: usize) -> bool {
    let Some((before, _)) = i.checked_sub(1).map(|j| &t[j]) else { return false };
    match before {
        Token::Ident("and" | "or" | "not" | "is" | "in" | "if" | "elif" | "else") => i >= 2 && matches!(t[i - 2].0, Token::Dot | Token::Pipe),
        Token::Ident(_) | Token::Str(_) | Token::String(_) | Token::Int(_) | Token::Int128(_) | Token::Float(_) | Token::BracketClose | Token::ParenClose | Token::BraceClose => true,
        _ => false,
    }
}

/// Reports whether the token at i is a string that is a subscript by the name of a method, see SUBSCRIPT.
fn is_method_subscript(t: &[(Token, Span)], i: usize) -> bool {
    let is_name = matches!(&t[i].0, Token::Str(s) if DICT_METHODS.contains(s));
    is_name && i > 0 && matches!(t[i - 1].0, Token::BracketOpen) && matches!(t.get(i + 1), Some((Token::BracketClose, _))) && ends_operand(t, i - 1)
}

/// Reports whether a bracket at i begins the arguments of the test `is in`.
fn is_test_argument(t: &[(Token, Span)], i: usize) -> bool {
    let is = |back: usize, w: &str| i >= back && matches!(&t[i - back].0, Token::Ident(x) if *x == w);
    is(1, "in") && (is(2, "is") || is(2, "not") && is(3, "is"))
}

/// Where the operand that begins at i ends, with its attributes, subscripts, calls and filters.
fn operand_end(t: &[(Token, Span)], mut i: usize) -> usize {
    while matches!(t.get(i), Some((Token::Minus, _))) {
        i += 1;
    }
    let mut depth = 0usize;
    let mut first = true;
    while let Some((token, _)) = t.get(i) {
        match token {
            Token::BracketOpen | Token::ParenOpen | Token::BraceOpen => depth += 1,
            Token::BracketClose | Token::ParenClose | Token::BraceClose if depth == 0 => break,
            Token::BracketClose | Token::ParenClose | Token::BraceClose => depth -= 1,
            _ if depth > 0 || first => {}
            Token::Dot | Token::Pipe => i += 1, // and the name
            Token::Str(_) | Token::String(_) => {} // strings in a row are one
            _ => break,
        }
        first = false;
        i += 1;
    }
    i.min(t.len())
}

/// Where the value of an argument begins, and whether it can be another value than a variable, an item
/// of one, a constant, or what another filter has bounded.
fn argument(t: &[(Token, Span)], from: usize, to: usize) -> (usize, bool) {
    let mut from = from;
    match t[from..to] {
        [(Token::Ident(_), _), (Token::Assign, _), ..] => from += 2,
        [(Token::Mul | Token::Pow, _), ..] => from += 1,
        _ => {}
    }
    let computed = t[from..to].iter().any(|(t, _)| matches!(t, Token::Plus | Token::Mul | Token::Pipe | Token::Colon));
    (from, computed)
}

/// Reports whether what is assigned needs no bound: it is a constant, or to a variable also an item of another one.
fn constant(t: &[(Token, Span)], attribute: bool) -> bool {
    t.iter().all(|(t, _)| match t {
        Token::Ident("true" | "false" | "none" | "True" | "False" | "None" | "not") => true,
        Token::Ident(_) | Token::Dot | Token::BracketOpen | Token::BracketClose => !attribute,
        Token::Str(_) | Token::String(_) | Token::Int(_) | Token::Float(_) | Token::Minus => true,
        _ => false,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rewritten(source: &str) -> String {
        let mut syntax = SyntaxConfig::builder();
        syntax.trim_blocks(true).lstrip_blocks(true);
        rewrite(source, "t", &syntax.build().unwrap()).unwrap()
    }

    #[test]
    fn what_outlives_its_expression_is_bounded() {
        for (source, want) in [
            ("a {{ b.c|d }} {# {{ #}{% if a == 'x' %}y{% endif %}", "a {{ b.c|d }} {# {{ #}{% if a == 'x' %}y{% endif %}"),
            ("{% set x = a + b -%}", "{% set x = ((a + b)|__bound) -%}"),
            ("{% set x = a.b[0] %}{% set n.x = true %}{% set n.x = a %}", "{% set x = a.b[0] %}{% set n.x = true %}{% set n.x = ((a)|__attribute) %}"),
            ("{%- set n.x = a, b %}", "{%- set n.x = ((a, b)|__attribute) %}"),
            ("{% set x | f(a=1) %}{% endset %}", "{% set x | f(a=1)|__attribute %}{% endset %}"),
            ("{% for k, (a, b) in x.items() if a in [b] %}", "{% for k, (a, b) in ((x.items())|__each) if a in (([b])|__bound) %}"),
            ("{% for a in recursive recursive %}", "{% for a in ((recursive)|__each) recursive %}"),
            ("{% with (a, b) = c, d = e %}", "{% with (a, b) = ((c)|__bound), d = ((e)|__bound) %}"),
            ("{{ f(a, b[1:], k=c + d, *e) }}", "{{ f(a, ((b[1:])|__bound), k=((c + d)|__bound), *e) }}"),
            ("{{ a[::-1] ~ [1, 'b'] ~ [a][0] }}", "{{ a[::((-1)|__step)] ~ [1, 'b'] ~ (([a])|__bound)[0] }}"),
            ("{{ -a.b[0] * c.d('e')|f + 1 }}", "{{ -a.b[0]|__factor * c.d('e')|__input|f|__factor + 1 }}"),
            ("{{ a|upper|trim|list|sort ~ '|' }}", "{{ a|__input|upper|trim|list|__input|sort ~ '|' }}"),
            ("{% macro f(a) -%}\n{% call(x) g() +%}", "{% macro f(a)  %}{% if 0|__step %}{% endif -%}\n{% call(x) g()  %}{% if 0|__step %}{% endif +%}"),
            ("{{ a + b ~ c + d ~ e + f ~ g + h ~ i ~ j }}", "{{ a + b ~ c + d ~ e + f ~ g + h|__operand ~ i ~ j }}"),
            ("{%- generation +%}{% endgeneration %}", "{%- with +%}{% endwith %}"),
            ("{% raw %}{% generation %}x['items']{% endraw %}{{ '{% generation %}' }}{# {% generation %} #}", "{% raw %}{% generation %}x['items']{% endraw %}{{ '{% generation %}' }}{# {% generation %} #}"),
            ("x['items']{{ x['items'] }}{{ x in ['items'] }}", "x['items']{{ x['\u{1}items'] }}{{ x in ['items'] }}"),
            ("{{ {'a': b} is in ([1], c) }}", "{{ (({'a': b})|__bound) is in ([1], c) }}"),
            ("{% macro f(a, b=[a]) %}", "{% macro f(a, b=(([a])|__bound))  %}{% if 0|__step %}{% endif %}"),
            ("{{ (a, b) and (a or b) }}", "{{ (((a, b))|__bound) and (a or b) }}"),
        ] {
            assert_eq!(rewritten(source), want);
        }
    }
}
