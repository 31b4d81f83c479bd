#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| warmroute_fuzz::responses(input));
