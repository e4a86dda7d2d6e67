// presets.c: the named models. What a paper trains with is part of its preset (steps: its tokens
// over its tokens per step). Where a paper leaves a number open, the note says which one was taken.
#include "presets.h"
#include "flags.h"

// Each macro is a model family with its paper's way of training; a row below adds a size. A later
// word overrides an earlier one, so a row may also correct its family.

// GPT-2, trained as llm.c trains it on FineWeb.
#define GPT2 \
    "--norm layer --bias on --positions learned --activation gelu --tied on --vocab 50257 " \
    "--seq 1024 --init-baseline scale --init-std 0.02 --steps 19073 --lr 6e-4 --min-lr 0 " \
    "--warmup 700 --batch 512 --decay-embeddings on --val-tokens 1048576 "
// The architecture of Llama, which all the families below share.
#define LLAMA "--norm rms --bias off --positions rope --activation swiglu "
// SpanNorm (arXiv 2601.22580), and its depth stress test at width 384.
#define SPAN_TRAINING \
    "--vocab 32000 --seq 2048 --init scale --init-std 0.02 --lr 2e-4 --min-lr 0.1 --warmup 200 " \
    "--val-tokens 1048576 "
#define SPAN_ LLAMA "--tied on " SPAN_TRAINING
#define SPAN_D384 \
    SPAN_ "--width 384 --heads 6 --ffn 1056 --batch 256 --init-std 0 --steps 5000 "
// HybridNorm (arXiv 2503.04598) and SDD (arXiv 2502.15499), which both train as OLMo does.
#define OLMO_TRAINING \
    LLAMA "--tied on --vocab 100278 --seq 4096 --rope-theta 500000 --lr 3e-4 --warmup 2000 " \
    "--batch 1024 --decay-gains zero --decay-embeddings off --val-tokens 1048576 "
#define HYB_ OLMO_TRAINING "--init-baseline normal --min-lr 0.1 --heads 16 --kv-heads 4 "
#define SDD_ OLMO_TRAINING "--init-baseline depth --min-lr 0.05 --heads 32 --kv-heads 8 "
// Mixture of experts: OLMoE, with a softmax router and losses that balance its load, and DeepSeek,
// with latent attention, shared experts and a selection bias that balances without a loss.
#define OLMOE_ROUTER \
    "--router softmax --balance-loss 0.01 --router-z-loss 0.001 --router-losses mean "
#define OLMOE \
    LLAMA OLMOE_ROUTER "--tied off --vocab 50280 --seq 4096 --experts 64 --experts-per-token 8 " \
    "--init-baseline normal --lr 4e-4 --min-lr 0.125 --warmup 2500 --batch 1024 " \
    "--decay-gains zero --decay-embeddings on --val-tokens 1048576 "
#define OLMOE_CHAR \
    LLAMA OLMOE_ROUTER "--tied off --layers 4 --width 128 --heads 4 --seq 64 --batch 16 " \
    "--steps 2000 --lr 2e-3 --warmup 100 "
#define DEEPSEEK \
    LLAMA "--tied off --router sigmoid --balance-loss 0 --router-z-loss 0 --sequence-loss 1e-4 " \
    "--router-losses sum --balance-rate 0.001 --shared-experts 2 --dense-layers 1 --eps 1e-6 "

// Name, flags, note.
const Preset PRESETS[] = {
    // For two CPU cores: the built-in stories, or bytes of your own text.
    {"stories", LLAMA "--layers 4 --width 128 --heads 4 --seq 128 --batch 8 --steps 600 "
     "--lr 2.5e-3 --warmup 60 --min-lr 0.05 --val-every 200 --val-tokens 32768 "
     "--temperature 0.6 --sample 600",
     "the built-in corpus in about a minute on two cores"},
    {"nanogpt-char", "--norm layer --bias off --positions learned --activation gelu --tied on "
     "--layers 4 --width 128 --heads 4 --seq 64 --batch 12 --steps 2000 --lr 1e-3 --min-lr 0.1 "
     "--warmup 100 --beta2 0.99 --init scale --init-std 0.02",
     "nanoGPT's CPU recipe for TinyShakespeare: bytes, no dropout; LayerNorm keeps its bias, "
     "GELU is the tanh form"},
    {"llama-char", LLAMA "--layers 6 --width 192 --heads 6 --kv-heads 2 --seq 128 --batch 16 "
     "--steps 2000 --lr 2e-3 --warmup 100",
     "a small Llama for bytes of your own text"},
    {"deep-char", LLAMA "--layers 24 --width 128 --heads 4 --seq 64 --batch 12 --steps 800 "
     "--lr 3e-3 --warmup 200 --init scale",
     "24 narrow layers with the branch sizes of SpanNorm's 740M"},
    // OpenAI's GPT-2 in its four sizes.
    {"gpt2-124M", GPT2 "--layers 12 --width 768 --heads 12",
     "GPT-2 small; training as llm.c's FineWeb recipe, 10B tokens"},
    {"gpt2-350M", GPT2 "--layers 24 --width 1024 --heads 16",
     "GPT-2 medium"},
    {"gpt2-774M", GPT2 "--layers 36 --width 1280 --heads 20",
     "GPT-2 large"},
    {"gpt2-1558M", GPT2 "--layers 48 --width 1600 --heads 25",
     "GPT-2 XL"},
    // SpanNorm's dense models, then narrow ones for its stress test in depth and its width proxy.
    {"span-740M", SPAN_ "--layers 24 --width 1536 --heads 24 --ffn 4224 --batch 256 "
     "--steps 57220",
     "SpanNorm 740M, 512K tokens a step; minimum rate open: 0.1"},
    {"span-1.3B", SPAN_ "--layers 48 --width 1536 --heads 24 --ffn 4224 --batch 512 "
     "--steps 95367",
     "SpanNorm 1.3B"},
    {"span-5B", SPAN_ "--layers 64 --width 2560 --heads 40 --ffn 6912 --batch 2048 "
     "--steps 47684",
     "SpanNorm 5B; HYBRID and Peri-LN, which is Gemma 2's there (SANDWICH): --lr 1e-4"},
    {"span-6.5B", SPAN_ "--layers 128 --width 2048 --heads 32 --ffn 5504 --batch 2048 "
     "--lr 1.2e-4 --steps 95367",
     "SpanNorm 128 layers; dimensions and batch open: these give 6.54B"},
    {"span-d384-32", SPAN_D384 "--layers 32",
     "SpanNorm depth stress; heads, ffn, batch and steps open; sigma keeps the 740M's branch "
     "sizes"},
    {"span-d384-64", SPAN_D384 "--layers 64", NULL},
    {"span-d384-128", SPAN_D384 "--layers 128", NULL},
    {"span-d384-256", SPAN_D384 "--layers 256", NULL},
    {"span-d384-512", SPAN_D384 "--layers 512", NULL},
    {"span-d640", SPAN_ "--layers 64 --width 640 --heads 10 --ffn 1728 --batch 256 --init-std 0 "
     "--steps 5000",
     "SpanNorm's width proxy of the 5B"},
    // HybridNorm.
    {"hybrid-151M", HYB_ "--layers 12 --width 768 --ffn 2048 --steps 47684",
     "HybridNorm"},
    {"hybrid-285M", HYB_ "--layers 12 --width 1024 --ffn 4096 --steps 47684", NULL},
    {"hybrid-550M", HYB_ "--layers 16 --width 1536 --ffn 4096 --steps 71526",
     "300B tokens, of figure 6; 400B in tables 3 to 5"},
    {"hybrid-543M", HYB_ "--layers 29 --width 1024 --ffn 4096 --steps 95367",
     "29 layers"},
    {"hybrid-1.2B", HYB_ "--layers 16 --width 2048 --heads 32 --kv-heads 8 --ffn 9192 "
     "--steps 238419",
     "ffn as in the paper; the released configuration has 8192"},
    // Scale-Distribution Decoupling.
    {"sdd-581M", SDD_ "--layers 8 --width 2048 --ffn 8192 --steps 47684",
     "dimensions open: these give 692M with the embedding, 487M without"},
    {"sdd-1B", SDD_ "--layers 16 --width 2048 --ffn 8192 --steps 476837",
     "SDD 1B; the released configuration ends at 0.1 of the rate, the paper at 0.05; its "
     "PreNorm has norms of q and k (PRE_QK_PRE)"},
    {"sdd-7B", SDD_ "--layers 32 --width 4096 --ffn 11008 --steps 953674",
     "SDD 7B; the paper prints the fused ffn width 22016"},
    // Mixture of experts, and miniatures that train on bytes.
    {"olmoe-588M-3B", OLMOE "--layers 32 --width 1024 --heads 16 --ffn 512 "
     "--init-baseline depth --min-lr 0.05 --steps 59605",
     "SDD's MoE of 588M active, 3.4B in all: they count one embedding and no router"},
    {"olmoe-1B-7B", OLMOE "--layers 16 --width 2048 --heads 16 --ffn 1024 --steps 119209",
     "OLMoE; HybridNorm's and SDD's MoE"},
    {"deepseek-16B", DEEPSEEK SPAN_TRAINING "--layers 27 --width 2048 --heads 16 --kv-rank 512 "
     "--rope-size 64 --ffn 1408 --experts 64 --experts-per-token 6 --dense-ffn 10944 "
     "--batch 2048 --steps 47684",
     "SpanNorm's A2.4B-16B: DeepSeek-V3's small model; router, losses and batch open"},
    {"olmoe-char", OLMOE_CHAR "--ffn 128 --experts 8 --experts-per-token 2",
     "miniature of OLMoE: 8 experts, 2 a token"},
    {"olmoe64-char", OLMOE_CHAR "--ffn 32 --experts 64 --experts-per-token 8",
     "64 narrow experts, 8 a token, as OLMoE has"},
    {"deepseek-char", DEEPSEEK "--layers 5 --width 128 --heads 4 --kv-rank 32 --rope-size 16 "
     "--ffn 64 --experts 16 --experts-per-token 4 --dense-ffn 384 --seq 64 --batch 16 "
     "--steps 2000 --lr 2e-3 --warmup 100",
     "miniature of DeepSeek's small model: latent attention, 16 experts, 4 a token, 2 shared"},
};
const int PRESET_COUNT = sizeof PRESETS / sizeof *PRESETS;

// The name is also the value of --model, so config.json keeps it.
void flags_preset(FlagSet *set, const char *name) {
    int i = 0;
    Nearest near = nearest_begin(name);
    for (int k = 0; k < PRESET_COUNT; k++) nearest_add(&near, PRESETS[k].name, PRESETS[k].name);
    while (i < PRESET_COUNT && strcmp(PRESETS[i].name, name)) i++;
    CHECK(i < PRESET_COUNT, "no model named %s\n  -> %s./train_gpt --show models lists them", name,
          near.text);
    flags_parse_text(set, PRESETS[i].flags, BY_PRESET);
    flag_set(set, &FLAGS[FLAG_model], name, BY_PRESET);
}
