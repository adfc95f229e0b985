//! A network as a list of operations on rows.
//!
//! A program is data: what to run, over named row buffers, named weights and named pieces of session state. The
//! number of rows is a parameter of every operation, so one program serves prefill, decode, verify and perplexity.
//! It never holds numbers from the weights and never runs anything: devices do.

use std::ops::Range;

/// Names a row buffer of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BufferId(pub usize);

/// Names a weight of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct WeightId(pub usize);

/// Names a piece of session state of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct StateId(pub usize);

/// Names a table of rotation angles: one per kind of position encoding, shared by all layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RopeId(pub usize);

/// A row buffer `[rows, width]` of f32.
#[derive(Debug, Clone, PartialEq)]
pub struct Buffer {
    /// What a reader calls it.
    pub name: String,
    /// Floats per row.
    pub width: usize,
}

/// The buffer that holds the residual stream: it travels with the batch from stage to stage.
pub const RESIDUAL: BufferId = BufferId(0);

/// Columns `at..at + width` of a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cols {
    /// The buffer.
    pub buffer: BufferId,
    /// First column.
    pub at: usize,
    /// Number of columns.
    pub width: usize,
}

/// Columns seen as heads: head `h` is columns `at + h·stride .. + dim`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Heads {
    /// The buffer.
    pub buffer: BufferId,
    /// First column of head 0.
    pub at: usize,
    /// Number of heads.
    pub count: usize,
    /// Floats in a head.
    pub dim: usize,
    /// Columns from one head to the next.
    pub stride: usize,
}

impl Cols {
    /// The columns as `count` adjacent heads.
    pub fn heads(self, count: usize) -> Heads {
        let dim = self.width / count;
        Heads { buffer: self.buffer, at: self.at, count, dim, stride: dim }
    }

    /// All columns as one head: a norm over the row.
    pub fn row(self) -> Heads {
        self.heads(1)
    }

    /// Part of these columns.
    pub fn part(self, range: Range<usize>) -> Cols {
        assert!(range.end <= self.width, "columns {range:?} of {}", self.width);
        Cols { buffer: self.buffer, at: self.at + range.start, width: range.len() }
    }
}

/// How a weight is used: this decides how a device keeps it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WeightKind {
    /// `[out, in]`: multiplies rows. Also read row by row where it is an embedding as well.
    Matrix,
    /// `[experts, out, in]`.
    Experts,
    /// `[vocab, d_model]`: rows are looked up, never multiplied.
    Table,
    /// f32 vector or small f32 array, read as it is (norms, biases, convolution kernels).
    Vector,
}

/// A tensor that the program reads.
#[derive(Debug, Clone, PartialEq)]
pub struct Weight {
    /// Its name in the model file.
    pub tensor: String,
    /// `[in, out, experts]` in the file's order: the input dimension first.
    pub shape: Vec<usize>,
    /// Its format in the file.
    pub format: motet_gguf::Format,
    /// How it is used.
    pub kind: WeightKind,
}

impl Weight {
    /// Number of values.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes in the model file.
    pub fn file_bytes(&self) -> u64 {
        (self.len() / self.format.block_len() * self.format.block_bytes()) as u64
    }
}

/// Pairs that a rotation turns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RopeStyle {
    /// Adjacent columns (2i, 2i + 1).
    Norm,
    /// Column i with column i + rot/2.
    Neox,
}

/// Stretching of positions for contexts longer than those of training.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RopeScaling {
    /// Positions as they are.
    None,
    /// Positions divided by the factor.
    Linear {
        /// The divisor.
        factor: f32,
    },
    /// YaRN (Peng et al. 2023, section 3).
    Yarn {
        /// Ratio of the new context to the trained one.
        factor: f32,
        /// Trained context.
        original_context: u32,
        /// Multiplies the growth of queries and keys, 1 + 0.1·ln(factor); 1 where the file has none.
        attention_factor: f32,
        /// Ramp's ends, in rotations over the trained context.
        beta_fast: f32,
        /// See `beta_fast`.
        beta_slow: f32,
    },
}

/// A rotary position encoding (Su et al. 2021): the angle of pair i at position p is `p · base^(−2i/rot)`.
#[derive(Debug, Clone, PartialEq)]
pub struct Rope {
    /// The base.
    pub base: f32,
    /// Columns of a head that turn, the first ones.
    pub rot: usize,
    /// Which columns form a pair.
    pub style: RopeStyle,
    /// Stretching.
    pub scaling: RopeScaling,
    /// Divisors of the frequencies, `[rot / 2]` (`rope_freqs`).
    pub factors: Option<WeightId>,
}

/// What a layer remembers of a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StateKind {
    /// Keys and values by position, in pages of the pool that the window names.
    Kv {
        /// Heads.
        heads: usize,
        /// Floats of a key.
        key_dim: usize,
        /// Floats of a value.
        value_dim: usize,
        /// Keys a row can see: its own and `window − 1` before it; `None`: all.
        window: Option<u32>,
    },
    /// The last `kernel − 1` inputs of a short convolution, `[kernel − 1, channels]`.
    Convolution {
        /// Taps.
        kernel: usize,
        /// Channels.
        channels: usize,
    },
    /// One matrix per value head, `[heads, key_dim, value_dim]`.
    Delta {
        /// Value heads.
        heads: usize,
        /// Rows of the matrix.
        key_dim: usize,
        /// Columns of the matrix.
        value_dim: usize,
    },
    /// The last rows of a buffer, `[rows, width]`, that of position p in place p mod `rows`.
    Recent {
        /// How many.
        rows: usize,
        /// Columns.
        width: usize,
    },
}

impl StateKind {
    /// Floats of recurrent state per session; 0 for pages.
    pub fn recurrent_floats(&self) -> usize {
        match *self {
            StateKind::Kv { .. } => 0,
            StateKind::Convolution { kernel, channels } => (kernel - 1) * channels,
            StateKind::Delta { heads, key_dim, value_dim } => heads * key_dim * value_dim,
            StateKind::Recent { rows, width } => rows * width,
        }
    }
}

/// A piece of session state.
#[derive(Debug, Clone, PartialEq)]
pub struct State {
    /// The layer it belongs to.
    pub layer: usize,
    /// What it is.
    pub kind: StateKind,
}

/// Non-linear functions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// x · sigmoid(x)
    Silu,
    /// GELU by the tanh formula (Hendrycks & Gimpel 2016).
    GeluTanh,
    /// 1 / (1 + e^−x)
    Sigmoid,
}

/// How router logits become weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gating {
    /// Soft-max over all experts.
    Softmax,
    /// Sigmoid of each.
    Sigmoid,
}

/// One operation on all rows. Fields named `out` are written, the others are read.
///
/// An operation works in place (`out` is one of its inputs) or writes to other buffers than it reads; only the
/// inputs of [`Op::Gate`] may be different columns of one buffer.
#[derive(Debug, Clone, PartialEq)]
pub enum Op {
    /// out = scale · row of the table at the row's token.
    Embed {
        /// `[vocab, d_model]`
        table: WeightId,
        /// Factor; 1 where the architecture has none.
        scale: f32,
        /// Where the rows go.
        out: Cols,
    },
    /// RMS norm of each head: out = x / √(mean(x²) + eps) · weight.
    Norm {
        /// Input heads; one head of the row's width is the usual norm.
        x: Heads,
        /// `[dim]`
        weight: WeightId,
        /// Added to the mean of squares.
        eps: f32,
        /// Output heads.
        out: Heads,
    },
    /// Each head to length 1: out = x / √(Σx² + eps) · scale.
    UnitNorm {
        /// Heads, in place.
        x: Heads,
        /// Added to the sum of squares.
        eps: f32,
        /// Factor.
        scale: f32,
    },
    /// out = W x (+ bias).
    Linear {
        /// Input.
        x: Cols,
        /// `[out, in]`
        weight: WeightId,
        /// `[out]`
        bias: Option<WeightId>,
        /// Output.
        out: Cols,
    },
    /// Turns heads by their position, in place.
    Rope {
        /// The heads.
        x: Heads,
        /// The angles.
        rope: RopeId,
    },
    /// Writes the rows' keys and values, then attends: out = softmax(scale · q kᵀ) v over the visible positions.
    Attend {
        /// Queries.
        q: Heads,
        /// Keys.
        k: Heads,
        /// Values.
        v: Heads,
        /// Output heads.
        out: Heads,
        /// The pages.
        state: StateId,
        /// Factor on the scores.
        scale: f32,
        /// First position that exists: 0, and 1 in an MTP layer.
        first: u32,
    },
    /// Writes the rows' keys and values for rows to come; nothing is attended to.
    Remember {
        /// Keys.
        k: Heads,
        /// Values.
        v: Heads,
        /// The pages.
        state: StateId,
    },
    /// Remembers the rows of each session, the last ones.
    Keep {
        /// The rows.
        x: Cols,
        /// Where all rows of a step wait that feeds the draft head.
        aside: Cols,
        /// Where the last ones are remembered.
        state: StateId,
    },
    /// Causal depthwise convolution over positions, then silu.
    Convolve {
        /// Input channels.
        x: Cols,
        /// `[channels, kernel]`
        weight: WeightId,
        /// The last inputs.
        state: StateId,
        /// Output channels.
        out: Cols,
    },
    /// The gated delta rule (Yang et al. 2024), value head j with key head j mod key heads:
    /// S ← e^(a·softplus(alpha + dt)) S; S += k ⊗ sigmoid(beta)(v − Sᵀk); out = Sᵀq.
    Delta {
        /// Queries, normalised and scaled.
        q: Heads,
        /// Keys, normalised.
        k: Heads,
        /// Values.
        v: Heads,
        /// `[value heads]`, before softplus; overwritten by the decays.
        alpha: Cols,
        /// `[value heads]`, before the sigmoid; overwritten by the step sizes.
        beta: Cols,
        /// `[value heads]`, negative.
        a: WeightId,
        /// `[value heads]`
        dt: WeightId,
        /// The matrices.
        state: StateId,
        /// Output heads.
        out: Heads,
    },
    /// out = activation(gate) · x, head by head.
    Gate {
        /// What is activated; a head of one column is the factor of a whole head.
        gate: Heads,
        /// By which function.
        activation: Activation,
        /// What it multiplies.
        x: Heads,
        /// Output.
        out: Heads,
    },
    /// out += x.
    Add {
        /// Added.
        x: Cols,
        /// Sum.
        out: Cols,
    },
    /// Chooses each row's experts from its router logits: the `used` greatest, equal ones by lower id.
    Route {
        /// Router logits `[experts]`; overwritten by probabilities.
        logits: Cols,
        /// How they become weights.
        gating: Gating,
        /// Added for the choice only, `[experts]`.
        selection_bias: Option<WeightId>,
        /// Experts per row.
        used: usize,
        /// Whether the chosen weights are divided by their sum.
        normalise: bool,
        /// Factor on the weights.
        scale: f32,
        /// `[used]` pairs (expert, weight), as `2·used` words.
        out: Cols,
    },
    /// The product with each chosen expert's matrix, rank by rank.
    ExpertLinear {
        /// One head that all ranks share, or a head for each rank.
        x: Heads,
        /// `[experts, out, in]`
        weight: WeightId,
        /// Output of `Route`.
        routing: Cols,
        /// A head of `out` columns for each rank.
        out: Heads,
    },
    /// out = Σ over ranks, ascending, weight · x\[rank\].
    Combine {
        /// `[used, d_model]`
        x: Cols,
        /// Output of `Route`.
        routing: Cols,
        /// `[d_model]`
        out: Cols,
    },
    /// Logits of the rows that were asked for: cap · tanh(W x / cap), or W x.
    Head {
        /// The normed hidden row.
        x: Cols,
        /// `[vocab, d_model]`
        weight: WeightId,
        /// Final soft cap.
        softcap: Option<f32>,
    },
}

/// Where in the network an operation stands: what a stage's range takes along.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// Before the layers: first stage.
    Input,
    /// In a layer.
    Layer(usize),
    /// After the layers, on rows that want logits: last stage.
    Output,
    /// After the layers, on all rows: what a session remembers of them for the draft head. Last stage.
    Keep,
    /// Of the rows with which the draft head is fed: its keys and values. Reads in the residual stream the row that was
    /// kept of the position before (zeros at the first). Last stage.
    Feed,
    /// From a row that was kept to the hidden row that the draft head begins with, in the residual stream. Last stage.
    Recall,
    /// The draft head on one row of each session: reads the hidden row in the residual stream, leaves its own there.
    /// Last stage.
    Draft,
}

/// Buffers, weights, state and operations.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Program {
    /// Row buffers; number 0 is the residual stream.
    pub buffers: Vec<Buffer>,
    /// Weights.
    pub weights: Vec<Weight>,
    /// Session state.
    pub states: Vec<State>,
    /// Position encodings.
    pub ropes: Vec<Rope>,
    /// Operations in order, with their place.
    pub ops: Vec<(Place, Op)>,
}

/// What an operation touches: declared, so that layouts and checks follow from it.
#[derive(Debug, Default)]
pub struct Touches {
    /// Buffers read.
    pub reads: Vec<BufferId>,
    /// Buffers written.
    pub writes: Vec<BufferId>,
    /// Weights read.
    pub weights: Vec<WeightId>,
    /// Session state read and written.
    pub state: Option<StateId>,
}

impl Op {
    /// The operation's name for people.
    pub fn name(&self) -> &'static str {
        match self {
            Op::Embed { .. } => "embed",
            Op::Norm { .. } => "norm",
            Op::UnitNorm { .. } => "unit norm",
            Op::Linear { .. } => "linear",
            Op::Rope { .. } => "rope",
            Op::Attend { .. } => "attend",
            Op::Remember { .. } => "remember",
            Op::Keep { .. } => "keep",
            Op::Convolve { .. } => "convolve",
            Op::Delta { .. } => "gated delta",
            Op::Gate { .. } => "gate",
            Op::Add { .. } => "add",
            Op::Route { .. } => "route",
            Op::ExpertLinear { .. } => "expert linear",
            Op::Combine { .. } => "combine",
            Op::Head { .. } => "head",
        }
    }

    /// Whether a row's result depends on nothing but the same row of the buffers: several such operations may be run
    /// one after the other for each row.
    pub fn is_row_wise(&self) -> bool {
        match self {
            Op::Embed { .. }
            | Op::Norm { .. }
            | Op::UnitNorm { .. }
            | Op::Rope { .. }
            | Op::Gate { .. }
            | Op::Add { .. }
            | Op::Route { .. }
            | Op::Combine { .. } => true,
            Op::Linear { .. }
            | Op::Attend { .. }
            | Op::Remember { .. }
            | Op::Keep { .. }
            | Op::Convolve { .. }
            | Op::Delta { .. }
            | Op::ExpertLinear { .. }
            | Op::Head { .. } => false,
        }
    }

    /// The buffers, weights and state of this operation.
    pub fn touches(&self) -> Touches {
        let mut t = Touches::default();
        match self {
            Op::Embed { table, out, .. } => {
                t.writes = vec![out.buffer];
                t.weights = vec![*table];
            }
            Op::Norm { x, weight, out, .. } => {
                t.reads = vec![x.buffer];
                t.writes = vec![out.buffer];
                t.weights = vec![*weight];
            }
            Op::UnitNorm { x, .. } | Op::Rope { x, .. } => {
                t.reads = vec![x.buffer];
                t.writes = vec![x.buffer];
            }
            Op::Linear { x, weight, bias, out } => {
                t.reads = vec![x.buffer];
                t.writes = vec![out.buffer];
                t.weights = [Some(*weight), *bias].into_iter().flatten().collect();
            }
            Op::Attend { q, k, v, out, state, .. } => {
                t.reads = vec![q.buffer, k.buffer, v.buffer];
                t.writes = vec![out.buffer];
                t.state = Some(*state);
            }
            Op::Remember { k, v, state } => {
                t.reads = vec![k.buffer, v.buffer];
                t.state = Some(*state);
            }
            Op::Keep { x, aside, state } => {
                t.reads = vec![x.buffer];
                t.writes = vec![aside.buffer];
                t.state = Some(*state);
            }
            Op::Convolve { x, weight, state, out } => {
                t.reads = vec![x.buffer];
                t.writes = vec![out.buffer];
                t.weights = vec![*weight];
                t.state = Some(*state);
            }
            Op::Delta { q, k, v, alpha, beta, a, dt, state, out } => {
                t.reads = vec![q.buffer, k.buffer, v.buffer];
                t.writes = vec![out.buffer, alpha.buffer, beta.buffer];
                t.weights = vec![*a, *dt];
                t.state = Some(*state);
            }
            Op::Gate { gate, x, out, .. } => {
                t.reads = vec![gate.buffer, x.buffer];
                t.writes = vec![out.buffer];
            }
            Op::Add { x, out } => {
                t.reads = vec![x.buffer, out.buffer];
                t.writes = vec![out.buffer];
            }
            Op::Route { logits, selection_bias, out, .. } => {
                t.reads = vec![logits.buffer];
                t.writes = vec![out.buffer, logits.buffer];
                t.weights = selection_bias.iter().copied().collect();
            }
            Op::ExpertLinear { x, weight, routing, out } => {
                t.reads = vec![x.buffer, routing.buffer];
                t.writes = vec![out.buffer];
                t.weights = vec![*weight];
            }
            Op::Combine { x, routing, out } => {
                t.reads = vec![x.buffer, routing.buffer];
                t.writes = vec![out.buffer];
            }
            Op::Head { x, weight, .. } => {
                t.reads = vec![x.buffer];
                t.weights = vec![*weight];
            }
        }
        t
    }
}

impl Program {
    /// The operations of a stage that holds `layers` of `all` trunk layers, in order, by index into `ops`.
    pub fn slice(&self, layers: Range<usize>, all: usize) -> Vec<usize> {
        let inside = |place: Place| match place {
            Place::Input => layers.start == 0,
            Place::Layer(l) => layers.contains(&l),
            Place::Output | Place::Keep | Place::Recall | Place::Feed | Place::Draft => layers.end == all,
        };
        (0..self.ops.len()).filter(|&i| inside(self.ops[i].0)).collect()
    }
}
