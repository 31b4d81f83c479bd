//! Tokenization of the next turn of a long chat. It is compared with tokenization from the
//! beginning, by this encoder and by the tokenizer library, in the same run.

#[expect(dead_code, reason = "shared by benches, each of which uses a part")]
#[path = "support/chats.rs"]
mod chats;

use chats::{body, encoder, library};
use divan::counter::BytesCount;
use divan::{Bencher, black_box};
use warmroute_core::block::{BlockHashes, BlockWindows, CacheSalt};
use warmroute_core::worker::BlockSize;
use warmroute_tokens::openai::{self, ApiKind, ApiRequest};
use warmroute_tokens::prompt::{Encoder, RenderedPrompt};

const MESSAGES: usize = 50;
const MESSAGE: usize = 2600;
const BLOCK: BlockSize = BlockSize(std::num::NonZeroU32::new(16).expect("16 is not zero"));

fn main() {
    divan::main();
}

/// Returns a chat with this many messages.
fn chat(messages: usize) -> ApiRequest {
    openai::parse(
        ApiKind::ChatCompletions,
        &body(&chats::messages(0, messages, MESSAGE)),
    )
    .expect("a chat")
}

fn rendered<'r>(encoder: &Encoder, request: &'r ApiRequest) -> RenderedPrompt<'r> {
    encoder.render(request).expect("the template renders it")
}

fn bytes(rendered: &RenderedPrompt<'_>) -> BytesCount {
    BytesCount::new(rendered.texts()[0].len())
}

#[divan::bench(sample_count = 20)]
fn limit_tokenizers_library_whole_chat(bencher: Bencher<'_, '_>) {
    let encoder = encoder(0);
    let request = chat(MESSAGES);
    let rendered = rendered(&encoder, &request);
    let tokenizer = library();
    bencher
        .counter(bytes(&rendered))
        .bench(|| tokenizer.encode_fast(black_box(&*rendered.texts()[0]), false));
}

#[divan::bench(sample_count = 20)]
fn whole_chat_without_cache(bencher: Bencher<'_, '_>) {
    let encoder = encoder(0);
    let request = chat(MESSAGES);
    let rendered = rendered(&encoder, &request);
    bencher
        .counter(bytes(&rendered))
        .bench(|| encoder.tokenize_cached(black_box(&rendered), None));
}

#[divan::bench(sample_count = 20)]
fn whole_chat_first_time(bencher: Bencher<'_, '_>) {
    let encoder = encoder(1 << 30);
    let request = chat(MESSAGES);
    let rendered = rendered(&encoder, &request);
    let mut number = 0;
    // Each iteration uses a new tenant, so that nothing is cached.
    let tenant = || {
        number += 1;
        number.to_string()
    };
    bencher
        .counter(bytes(&rendered))
        .with_inputs(tenant)
        .bench_local_values(|tenant| encoder.tokenize_cached(black_box(&rendered), Some(&tenant)));
}

#[divan::bench(sample_count = 200)]
fn next_turn_of_chat(bencher: Bencher<'_, '_>) {
    let encoder = encoder(1 << 30);
    let before = chat(MESSAGES - 2);
    let request = chat(MESSAGES);
    let before = rendered(&encoder, &before);
    let rendered = rendered(&encoder, &request);
    let mut number = 0;
    // Each tenant has sent the previous turn.
    let tenant = || {
        number += 1;
        let tenant = number.to_string();
        encoder
            .tokenize_cached(&before, Some(&tenant))
            .expect("its tokens");
        tenant
    };
    bencher
        .counter(bytes(&rendered))
        .with_inputs(tenant)
        .bench_local_values(|tenant| encoder.tokenize_cached(black_box(&rendered), Some(&tenant)));
}

#[divan::bench(sample_count = 200)]
fn repeated_chat(bencher: Bencher<'_, '_>) {
    let encoder = encoder(1 << 30);
    let request = chat(MESSAGES);
    let rendered = rendered(&encoder, &request);
    bencher
        .counter(bytes(&rendered))
        .bench(|| encoder.tokenize_cached(black_box(&rendered), None));
}

#[divan::bench]
fn hash_blocks_of_resumed_chat(bencher: Bencher<'_, '_>) {
    let encoder = encoder(1 << 30);
    let request = chat(MESSAGES);
    let tokens = encoder
        .tokenize_cached(&rendered(&encoder, &request), None)
        .expect("its tokens")
        .remove(0);
    bencher.bench(|| {
        black_box(&tokens).block_hashes(&CacheSalt::default(), BLOCK, BlockWindows::Plain)
    });
}

#[divan::bench]
fn hash_blocks_of_whole_chat(bencher: Bencher<'_, '_>) {
    let encoder = encoder(0);
    let request = chat(MESSAGES);
    let tokens = encoder
        .tokenize(&rendered(&encoder, &request))
        .expect("its tokens")
        .remove(0);
    bencher.bench(|| BlockHashes::from_tokens(black_box(&tokens), BLOCK, &CacheSalt::default()));
}
