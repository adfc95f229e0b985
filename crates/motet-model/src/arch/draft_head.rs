//! The multi-token-prediction head (DeepSeek-V3, section 2.2; "nextn" in model files): one decoder layer behind the
//! trunk that predicts a token further.
//!
//! Of the hidden row h of position p − 1 (after the output norm) and the token at p it makes
//! u = W_eh \[norm(E\[token\]); norm(h)\], runs its layer with keys and values of its own, and gives the logits of the
//! token at p + 1; its own hidden row, g, takes h's place when it goes on. An entry lives at the position of the token it
//! consumes, so entry 0 does not exist and a page never depends on a token beyond it.
//!
//! The head is *fed* with every row of the trunk that comes before a row for which it drafts: keys and values of u, no
//! more. Until then a session remembers the last rows of the trunk. Only drafting runs the layer.

use super::blocks::Sizes;
use crate::batch::RECENT;
use crate::builder::Builder;
use crate::header::ModelError;
use crate::program::*;

/// The trunk's program, complete in `b`, with the head behind it; `None` if the file holds none. Of several MTP layers the
/// first is the head: it goes on with its own hidden rows, and the others are left out.
///
/// `remember` writes the keys and values of normed rows, `layer` runs the head's layer on the residual stream.
pub(super) fn with_draft_head(
    mut b: Builder<'_>,
    sizes: &Sizes,
    remember: impl FnOnce(&mut Builder<'_>, Cols) -> Result<(), ModelError>,
    layer: impl FnOnce(&mut Builder<'_>) -> Result<(), ModelError>,
) -> Result<Option<Program>, ModelError> {
    if sizes.mtp_layers == 0 {
        return Ok(None);
    }
    let (p, d) = (format!("blk.{}", sizes.layers), sizes.d_model);
    let residual = b.residual();

    // Kept as the trunk leaves them: most steps keep rows and feed nobody, and the norm can wait with the feeding.
    b.at(Place::Keep);
    let [aside, u, normed] = ["aside", "u", "normed"].map(|name| b.buffer(name, d));
    let state = b.state(sizes.layers, StateKind::Recent { rows: RECENT, width: d });
    b.push(Op::Keep { x: residual, aside, state });

    b.at(Place::Feed);
    b.norm("output_norm.weight", residual, sizes.eps, residual)?;
    join(&mut b, sizes, residual, u)?;
    b.norm(&format!("{p}.attn_norm.weight"), u, sizes.eps, normed)?;
    remember(&mut b, normed)?;

    b.at(Place::Recall);
    b.norm("output_norm.weight", residual, sizes.eps, residual)?;

    b.at(Place::Draft);
    join(&mut b, sizes, residual, residual)?;
    layer(&mut b)?;
    let own = format!("{p}.nextn.shared_head_norm.weight");
    let norm = if b.has(&own) { own.as_str() } else { "output_norm.weight" };
    b.norm(norm, residual, sizes.eps, residual)?;
    let own = format!("{p}.nextn.shared_head_head.weight");
    let head = [own.as_str(), "output.weight"].into_iter().find(|n| b.has(n)).unwrap_or("token_embd.weight");
    let weight = b.weight(head, &[d, sizes.vocab], WeightKind::Matrix)?;
    b.push(Op::Head { x: residual, weight, softcap: None });
    Ok(Some(b.finish()))
}

/// out = W_eh \[norm(E\[token\]); norm(hidden)\].
fn join(b: &mut Builder<'_>, sizes: &Sizes, hidden: Cols, out: Cols) -> Result<(), ModelError> {
    let (p, d) = (format!("blk.{}.nextn", sizes.layers), sizes.d_model);
    let (embedded, both) = (b.buffer("embedded", d), b.buffer("embedded, hidden", 2 * d));
    let own = format!("{p}.embed_tokens.weight");
    let table = if b.has(&own) { own.as_str() } else { "token_embd.weight" };
    let table = b.weight(table, &[d, sizes.vocab], WeightKind::Table)?;
    b.push(Op::Embed { table, scale: 1.0, out: embedded });
    b.norm(&format!("{p}.enorm.weight"), embedded, sizes.eps, both.part(0..d))?;
    b.norm(&format!("{p}.hnorm.weight"), hidden, sizes.eps, both.part(d..2 * d))?;
    b.linear(&format!("{p}.eh_proj"), both, out)
}
