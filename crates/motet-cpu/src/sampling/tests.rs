//! Choices against a straightforward definition (f64, sorted, its own Philox), frequencies, ties, extremes.

use super::*;
use crate::testing::{Random, same_on_all};

const SETTINGS: Settings = Settings {
    seed: 0x1234_5678_9abc_def0,
    choice: 0,
    position: 17,
    temperature: 1.0,
    top_k: 0,
    top_p: 1.0,
    min_p: 0.0,
    repetition_penalty: 1.0,
    frequency_penalty: 0.0,
    presence_penalty: 0.0,
};

/// The choice of every instruction set, which must be the same.
fn choice(logits: &[f32], settings: &Settings, seen: &[(u32, u32)], bias: &[(u32, f32)]) -> u32 {
    let found = same_on_all(|isa| {
        let mut scratch = vec![f32::NAN; scratch_len(logits.len())];
        vec![pick(isa, logits, settings, seen.iter().copied(), bias, &[], &mut scratch).unwrap() as f32]
    });
    found[0] as u32
}

/// Philox4x32-10 by 64-bit products, as the paper writes it.
fn plain_philox(mut c: [u32; 4], mut k: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        let a = u64::from(c[0]) * 0xd251_1f53;
        let b = u64::from(c[2]) * 0xcd9e_8d57;
        c = [(b >> 32) as u32 ^ c[1] ^ k[0], b as u32, (a >> 32) as u32 ^ c[3] ^ k[1], a as u32];
        k = [k[0].wrapping_add(0x9e37_79b9), k[1].wrapping_add(0xbb67_ae85)];
    }
    c
}

#[test]
fn philox_gives_the_published_words() {
    // Random123's kat_vectors, philox4x32 with 10 rounds: counter, key, result.
    for (counter, key, words) in [
        ([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
        ([u32::MAX; 4], [u32::MAX; 2], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]),
        (
            [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
            [0xa409_3822, 0x299f_31d0],
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
        ),
    ] {
        assert_eq!(philox4x32_10(counter, key), words);
        assert_eq!(plain_philox(counter, key), words);
    }
}

fn plain_noise(settings: &Settings, token: u32) -> f64 {
    let key = [settings.seed as u32, (settings.seed >> 32) as u32];
    let words = plain_philox([settings.position, token / 4, settings.choice, 0], key);
    let v = (words[token as usize % 4] as f32 + 0.5) / 4_294_967_296.0;
    -(-(-f64::from(v)).ln_1p()).ln()
}

dispatch! {
    fn noise_of(settings: &Settings, group: u32) -> Vec<f32> = noise_of_on_lanes;
}

#[inline(always)]
fn noise_of_on_lanes<L: Lanes>(l: L, settings: &Settings, group: u32) -> Vec<f32> {
    noise::in_order(l, noise::words(l, settings, group)).into_iter().flat_map(|v| l.to_array(v)).collect()
}

dispatch! {
    fn gumbel_of(words: &[i32; LANES]) -> Vec<f32> = gumbel_of_on_lanes;
}

#[inline(always)]
fn gumbel_of_on_lanes<L: Lanes>(l: L, words: &[i32; LANES]) -> Vec<f32> {
    l.to_array(noise::gumbel(l, l.load_i(words))).to_vec()
}

#[test]
fn noise_belongs_to_its_token_and_stays_in_bounds() {
    for group in [0, 1, 700] {
        for choice in [0, 3] {
            let settings = Settings { choice, ..SETTINGS };
            let found = same_on_all(|isa| noise_of(isa, &settings, group));
            for (i, found) in found.into_iter().enumerate() {
                let expected = plain_noise(&settings, group * 64 + i as u32);
                assert!((f64::from(found) - expected).abs() < 1e-5 * expected.abs().max(1.0), "{i}");
            }
        }
    }
    let found = same_on_all(|isa| gumbel_of(isa, &std::array::from_fn(|i| [0, 1, -1, -2, i32::MIN][i % 5])));
    assert!((22.87..NOISE_BOUND).contains(&found[0]), "the greatest noise is {}", found[0]);
    assert_eq!(found[2], f32::NEG_INFINITY);
    assert!(found.iter().all(|x| *x < NOISE_BOUND && !x.is_nan()));
}

/// What the plain definition says: the winner, and how far the nearest other outcome is away.
struct Plain {
    token: u32,
    margin: f64,
}

fn plain_pick(logits: &[f32], s: &Settings, seen: &[(u32, u32)], bias: &[(u32, f32)]) -> Plain {
    let mut l = logits.to_vec();
    for &(token, added) in bias {
        l[token as usize] += added;
    }
    for &(token, generated) in seen {
        let x = &mut l[token as usize];
        *x = if *x > 0.0 { *x / s.repetition_penalty } else { *x * s.repetition_penalty };
        *x -= s.frequency_penalty * generated as f32;
        *x -= if generated > 0 { s.presence_penalty } else { 0.0 };
    }
    let mut order: Vec<u32> = (0..l.len() as u32).collect();
    if s.temperature == 0.0 {
        order.sort_by(|&a, &b| l[b as usize].partial_cmp(&l[a as usize]).unwrap());
        return Plain { token: order[0], margin: 1.0 };
    }
    let t: Vec<f32> = l.iter().map(|x| x / s.temperature).collect();
    order.sort_by(|&a, &b| t[b as usize].partial_cmp(&t[a as usize]).unwrap());
    let weight = |token: u32| (f64::from(t[token as usize]) - f64::from(t[order[0] as usize])).exp();
    let total: f64 = order.iter().map(|&token| weight(token)).sum();
    let mut margin = 1.0f64;
    let (mut sum, mut kept) = (0.0, 0);
    for &token in &order {
        // The borders: where rounding could put one token more or less in.
        if s.top_p < 1.0 && kept > 0 {
            margin = margin.min((sum / total - f64::from(s.top_p)).abs() * 1e3);
        }
        if kept > 0 {
            margin = margin.min((weight(token) / f64::from(s.min_p) - 1.0).abs() * 10.0);
        }
        let more = kept == 0
            || (s.top_p >= 1.0 || sum < f64::from(s.top_p) * total)
                && (s.top_k == 0 || kept < s.top_k as usize)
                && weight(token) >= f64::from(s.min_p);
        if !more {
            break;
        }
        sum += weight(token);
        kept += 1;
    }
    let score = |token: u32| f64::from(t[token as usize]) + plain_noise(s, token);
    let mut race = order[..kept].to_vec();
    race.sort_by(|&a, &b| score(b).partial_cmp(&score(a)).unwrap().then(a.cmp(&b)));
    if kept > 1 {
        margin = margin.min(score(race[0]) - score(race[1]));
    }
    Plain { token: race[0], margin }
}

#[test]
fn choices_are_those_of_the_plain_definition() {
    let mut random = Random::new(61);
    let (mut compared, mut cut) = (0, 0);
    for round in 0..1500u32 {
        let vocab = [1, 5, 16, 63, 64, 65, 300, 1000][random.below(8)];
        let spread = [0.0, 0.5, 3.0, 8.0][random.below(4)];
        let mut logits: Vec<f32> = (0..vocab).map(|_| random.unit() * spread - 1.0).collect();
        if random.below(3) == 0 {
            // Many equal logits: ties at every border.
            logits.iter_mut().for_each(|l| *l = l.round());
        }
        let settings = Settings {
            seed: u64::from(random.next()) << 32 | u64::from(random.next()),
            choice: random.below(3) as u32,
            position: round,
            temperature: [0.0, 0.3, 1.0, 1.7][random.below(4)],
            top_k: [0, 1, 2, 7, 40, 5000][random.below(6)],
            top_p: [1.0, 0.95, 0.6, 0.1, 0.0][random.below(5)],
            min_p: [0.0, 0.05, 0.5, 1.0][random.below(4)],
            repetition_penalty: [1.0, 1.3, 0.8][random.below(3)],
            frequency_penalty: [0.0, 0.5][random.below(2)],
            presence_penalty: [0.0, -0.7][random.below(2)],
        };
        let seen: Vec<(u32, u32)> =
            (0..vocab as u32).filter(|_| random.below(5) == 0).map(|token| (token, token % 3)).collect();
        let bias: Vec<(u32, f32)> =
            (0..random.below(4)).map(|_| (random.below(vocab) as u32, random.unit() * 4.0)).collect();
        let plain = plain_pick(&logits, &settings, &seen, &bias);
        let found = choice(&logits, &settings, &seen, &bias);
        if plain.margin > 1e-4 {
            assert_eq!(found, plain.token, "{settings:?} {vocab}");
            compared += 1;
            cut += usize::from(settings.top_p < 1.0 || settings.top_k > 0);
        }
    }
    assert!(compared > 1000 && cut > 700, "{compared} {cut}");
}

#[test]
fn large_vocabularies_with_flat_and_steep_rows() {
    let mut random = Random::new(62);
    let vocab = 50_001;
    let flat: Vec<f32> = (0..vocab).map(|_| random.unit() * 0.01).collect();
    let steep: Vec<f32> = (0..vocab).map(|_| random.unit() * 30.0).collect();
    let mut compared = 0;
    for logits in [&flat, &steep] {
        for (top_k, top_p) in [(0, 1.0), (50, 1.0), (0, 0.9), (1000, 0.99), (40_000, 1.0), (0, 0.5)] {
            for seed in 0..3 {
                let settings = Settings { seed, top_k, top_p, ..SETTINGS };
                let plain = plain_pick(logits, &settings, &[], &[]);
                // On the flat row a border of top-p is never far away: one token is 2e-5 of the sum.
                if plain.margin > 1e-4 || logits == &flat && top_p < 1.0 {
                    let found = choice(logits, &settings, &[], &[]);
                    assert_eq!(found, plain.token, "{top_k} {top_p} {seed}");
                    compared += 1;
                }
            }
        }
    }
    assert!(compared >= 25, "{compared}");
}

#[test]
fn equals_go_to_the_lower_id() {
    let greedy = Settings { temperature: 0.0, ..SETTINGS };
    let mut logits = vec![-1.0; 200];
    for at in [190, 77, 130] {
        logits[at] = 4.5;
    }
    assert_eq!(choice(&logits, &greedy, &[], &[]), 77);
    assert_eq!(choice(&[-0.0, 0.0, -1.0], &greedy, &[], &[]), 0);
    assert_eq!(choice(&[0.0, -0.0, -1.0], &greedy, &[], &[]), 0);
    // 100 equal tokens and room for 7: only the first 7 can ever win, and each does.
    for settings in [Settings { top_k: 7, ..SETTINGS }, Settings { top_p: 0.0695, ..SETTINGS }] {
        let mut wins = [0; 100];
        for position in 0..400 {
            wins[choice(&[0.25; 100], &Settings { position, ..settings }, &[], &[]) as usize] += 1;
        }
        assert!(wins[..7].iter().all(|&n| n > 20), "{wins:?}");
        assert_eq!(wins[..7].iter().sum::<i32>(), 400);
    }
    // The two zeros are one value at a border, too.
    for position in 0..50 {
        let settings = Settings { position, top_k: 1, ..SETTINGS };
        assert_eq!(choice(&[-1.0, -0.0, 0.0], &settings, &[], &[]), 1);
    }
}

#[test]
fn frequencies_follow_the_probabilities() {
    // 20 tokens, 20,000 positions: chi-square with 19 degrees of freedom is below 43.8 with probability 0.999.
    let logits: Vec<f32> = (0..20).map(|i| (i * 7 % 20) as f32 * 0.15).collect();
    let total: f64 = logits.iter().map(|&l| (f64::from(l) / 0.8).exp()).sum();
    for choice in [0, 1] {
        let mut counts = [0u32; 20];
        let mut scratch = vec![0.0; scratch_len(20)];
        for position in 0..20_000 {
            let settings = Settings { position, choice, temperature: 0.8, ..SETTINGS };
            counts[pick(Isa::best(), &logits, &settings, [], &[], &[], &mut scratch).unwrap() as usize] += 1;
        }
        let chi: f64 = counts
            .iter()
            .zip(&logits)
            .map(|(&n, &l)| {
                let expected = 20_000.0 * (f64::from(l) / 0.8).exp() / total;
                (f64::from(n) - expected).powi(2) / expected
            })
            .sum();
        assert!(chi < 43.8, "chi-square {chi}");
        assert!(chi > 3.0, "chi-square {chi}: too even to be random");
    }
}

#[test]
fn the_noise_couples_two_rows_as_gumbel_noise_should() {
    // Two distributions agree with probability Σ 1 / Σ max(pj/pi, qj/qi) (DESIGN, "Drafts").
    let p = [0.5f64, 0.3, 0.15, 0.05];
    let q = [0.2f64, 0.4, 0.1, 0.3];
    let row = |p: &[f64]| p.iter().map(|p| p.ln() as f32).collect::<Vec<f32>>();
    let (a, b) = (row(&p), row(&q));
    let mut scratch = vec![0.0; scratch_len(4)];
    let mut agreed = 0;
    for position in 0..20_000 {
        let settings = Settings { position, ..SETTINGS };
        let mut one =
            |logits: &[f32]| pick(Isa::best(), logits, &settings, [], &[], &[], &mut scratch).unwrap();
        agreed += usize::from(one(&a) == one(&b));
    }
    let expected: f64 =
        (0..4).map(|i| 1.0 / (0..4).map(|j| f64::max(p[j] / p[i], q[j] / q[i])).sum::<f64>()).sum();
    let found = agreed as f64 / 20_000.0;
    assert!((found - expected).abs() < 0.015, "{found} for {expected}");
}

#[test]
fn extreme_rows_and_settings_choose_something_kept() {
    let mut logits = vec![f32::MIN; 70];
    logits[69] = f32::MAX;
    logits[3] = f32::MAX;
    for temperature in [0.0, 1e-30, 1e-6, 1.0, 100.0] {
        let settings = Settings { temperature, top_k: 1, ..SETTINGS };
        assert_eq!(choice(&logits, &settings, &[], &[]), 3);
        let settings = Settings { temperature, top_p: 0.5, ..SETTINGS };
        assert_eq!(choice(&logits, &settings, &[], &[(3, f32::MAX)]), 3);
        assert!([3, 69].contains(&choice(&logits, &Settings { temperature, ..SETTINGS }, &[], &[])));
    }
    let banned = Settings { temperature: 1.0, ..SETTINGS };
    for position in 0..50 {
        assert_eq!(choice(&[1.0, 2.0], &Settings { position, ..banned }, &[], &[(1, -100.0)]), 0);
    }
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut scratch = vec![0.0; scratch_len(3)];
        for isa in Isa::available() {
            assert_eq!(
                pick(isa, &[0.0, bad, 1.0], &SETTINGS, [], &[], &[], &mut scratch),
                Err(NonFiniteLogits)
            );
            assert_eq!(LogNormaliser::new(isa, &[0.0, bad, 1.0]), Err(NonFiniteLogits));
        }
    }
}

#[test]
fn log_probabilities_and_the_most_likely_are_those_of_f64() {
    let mut random = Random::new(63);
    for vocab in [1, 15, 16, 1000, 1025, 70_000] {
        for rounded in [false, true] {
            let mut logits = random.row(vocab);
            if rounded {
                logits.iter_mut().for_each(|l| *l = (*l * 4.0).round());
            }
            let max = logits.iter().copied().fold(f32::MIN, f32::max);
            let sum: f64 = logits.iter().map(|&l| f64::from(l - max).exp()).sum();
            let expected = |token: u32| f64::from(logits[token as usize]) - f64::from(max) - sum.ln();
            let mut order: Vec<u32> = (0..vocab as u32).collect();
            order.sort_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]));
            for n in [0, 1, 5, 20] {
                let found = same_on_all(|isa| {
                    let normaliser = LogNormaliser::new(isa, &logits).unwrap();
                    let mut best = vec![(u32::MAX, 0.0); n];
                    let count = most_likely(isa, &logits, &normaliser, &mut best);
                    assert_eq!(count, n.min(vocab));
                    best[..count].iter().flat_map(|&(token, p)| [token as f32, p]).collect()
                });
                for (rank, pair) in found.chunks(2).enumerate() {
                    assert_eq!(pair[0] as u32, order[rank]);
                    assert!((f64::from(pair[1]) - expected(order[rank])).abs() < 2e-6 * 20.0);
                }
            }
        }
    }
}

#[test]
fn a_digest_changes_with_every_bit() {
    let row = Random::new(64).row(100);
    let whole = digest(&row);
    assert_eq!(whole, digest(&row.clone()));
    let mut digests = std::collections::HashSet::from([whole]);
    for at in 0..100 {
        for bit in 0..32 {
            let mut row = row.clone();
            row[at] = f32::from_bits(row[at].to_bits() ^ 1 << bit);
            assert!(digests.insert(digest(&row)), "{at} {bit}");
        }
    }
    assert!(digests.insert(digest(&row[..99])));
    assert!(
        digests.insert(digest(&[0.0; 3]))
            && digests.insert(digest(&[0.0; 4]))
            && digests.insert(digest(&[-0.0; 4]))
    );
}

/// A token that may not be chosen is one with a bias of −∞.
#[test]
fn only_allowed_tokens_are_chosen() {
    let mut random = Random::new(5);
    for round in 0..200 {
        let vocab = [3, 64, 65, 200][round % 4];
        let logits = random.row(vocab);
        let allowed: Vec<u64> = (0..vocab.div_ceil(64))
            .map(|_| u64::from(random.next()) << 32 | u64::from(random.next()) | 4)
            .collect();
        let may = |token: u32| allowed[token as usize / 64] >> (token % 64) & 1 == 1;
        let bias: Vec<(u32, f32)> =
            (0..vocab as u32).filter(|&t| !may(t)).map(|t| (t, f32::NEG_INFINITY)).collect();
        let seen = [(1, 2)];
        let settings = Settings {
            position: round as u32,
            temperature: [0.0, 0.7, 1.0][round % 3],
            top_k: [0, 5][round % 2],
            repetition_penalty: 1.3,
            ..SETTINGS
        };
        let mut scratch = vec![f32::NAN; scratch_len(vocab)];
        for isa in Isa::available() {
            let found = pick(isa, &logits, &settings, seen, &[], &allowed, &mut scratch).unwrap();
            assert!(may(found), "{found}");
            assert_eq!(found, choice(&logits, &settings, &seen, &bias));
        }
    }
}
