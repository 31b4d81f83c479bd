//! What the next turn of a long chat costs at the tokenizer, beside what the whole costs from the beginning, with our
//! encoder and with the bare tokenizer library in the same run.

#[expect(dead_code, reason = "shared by benches, none of which needs all of it")]
#[path = "support/chats.rs"]
mod chats;

use chats::{body, encoder, library};
use divan::{Bencher, black_box, counter::BytesCount};
use warmroute::block::{BlockHashes, Salt, Windows};
use warmroute::openai::{self, Api, Request};
use warmroute::prompt::{Encoder, Rendered};
use warmroute::worker::BlockSize;

const MESSAGES: usize = 50;
const MESSAGE: usize = 2600;
const BLOCK: BlockSize = BlockSize(std::num::NonZeroU32::new(16).expect("16 is not zero"));

fn main() {
    divan::main();
}

/// A chat of so many messages.
fn chat(messages: usize) -> Request {
    openai::parse(
        Api::ChatCompletions,
        &body(&chats::messages(0, messages, MESSAGE)),
    )
    .expect("a chat")
}

fn rendered<'r>(encoder: &Encoder, request: &'r Request) -> Rendered<'r> {
    encoder.render(request).expect("the template takes it")
}

fn bytes(rendered: &Rendered<'_>) -> BytesCount {
    BytesCount::new(rendered.texts()[0].len())
}

#[divan::bench(sample_count = 20)]
fn limit_tokenizers_library_whole_chat(bencher: Bencher<'_, '_>) {
    let (encoder, request) = (encoder(0), chat(MESSAGES));
    let rendered = rendered(&encoder, &request);
    let tokenizer = library();
    bencher
        .counter(bytes(&rendered))
        .bench(|| tokenizer.encode_fast(black_box(&*rendered.texts()[0]), false));
}

#[divan::bench(sample_count = 20)]
fn whole_chat_without_cache(bencher: Bencher<'_, '_>) {
    let (encoder, request) = (encoder(0), chat(MESSAGES));
    let rendered = rendered(&encoder, &request);
    bencher
        .counter(bytes(&rendered))
        .bench(|| encoder.tokenize_resuming(black_box(&rendered), None));
}

#[divan::bench(sample_count = 20)]
fn whole_chat_never_seen(bencher: Bencher<'_, '_>) {
    let (encoder, request) = (encoder(1 << 30), chat(MESSAGES));
    let rendered = rendered(&encoder, &request);
    let mut number = 0;
    // Another tenant each time, so that nothing is known.
    let tenant = || {
        number += 1;
        number.to_string()
    };
    bencher
        .counter(bytes(&rendered))
        .with_inputs(tenant)
        .bench_local_values(|tenant| {
            encoder.tokenize_resuming(black_box(&rendered), Some(&tenant))
        });
}

#[divan::bench(sample_count = 200)]
fn next_turn_of_the_chat(bencher: Bencher<'_, '_>) {
    let (encoder, before, request) = (encoder(1 << 30), chat(MESSAGES - 2), chat(MESSAGES));
    let (before, rendered) = (rendered(&encoder, &before), rendered(&encoder, &request));
    let mut number = 0;
    // Each tenant has sent the turn before.
    let tenant = || {
        number += 1;
        let tenant = number.to_string();
        encoder
            .tokenize_resuming(&before, Some(&tenant))
            .expect("its tokens");
        tenant
    };
    bencher
        .counter(bytes(&rendered))
        .with_inputs(tenant)
        .bench_local_values(|tenant| {
            encoder.tokenize_resuming(black_box(&rendered), Some(&tenant))
        });
}

#[divan::bench(sample_count = 200)]
fn the_same_chat_again(bencher: Bencher<'_, '_>) {
    let (encoder, request) = (encoder(1 << 30), chat(MESSAGES));
    let rendered = rendered(&encoder, &request);
    bencher
        .counter(bytes(&rendered))
        .bench(|| encoder.tokenize_resuming(black_box(&rendered), None));
}

#[divan::bench]
fn blocks_of_the_chat_resumed(bencher: Bencher<'_, '_>) {
    let (encoder, request) = (encoder(1 << 30), chat(MESSAGES));
    let tokens = encoder
        .tokenize_resuming(&rendered(&encoder, &request), None)
        .expect("its tokens")
        .remove(0);
    bencher.bench(|| black_box(&tokens).hashes(&Salt::default(), BLOCK, Windows::Plain));
}

#[divan::bench]
fn blocks_of_the_chat_from_the_beginning(bencher: Bencher<'_, '_>) {
    let (encoder, request) = (encoder(0), chat(MESSAGES));
    let tokens = encoder
        .tokenize(&rendered(&encoder, &request))
        .expect("its tokens")
        .remove(0);
    bencher.bench(|| BlockHashes::of(black_box(&tokens), BLOCK, &Salt::default()));
}
