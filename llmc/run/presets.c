// presets.c: the named models. A paper's preset includes its training recipe (steps: total tokens
// over tokens per step). If a paper leaves a number open, the note says so, and what was chosen.
#include "presets.h"

// Each macro is a model family with its paper's training recipe; a row below adds a size. A later
// flag overrides an earlier one, so a row may also change a flag of its family.
#define SIZE(layers, width, heads) "--layers " #layers " --width " #width " --heads " #heads " "
#define VAL "--val-tokens 1048576 "

// GPT-2, trained as llm.c trains it on FineWeb.
#define GPT2_BLOCK "--norm layer --positions learned --activation gelu --tied on "
#define GPT2 \
    GPT2_BLOCK "--bias on --vocab 50257 --seq 1024 --init-baseline scale --init-std 0.02 " \
    "--steps 19073 --lr 6e-4 --min-lr 0 --warmup 700 --batch 512 --decay-embeddings on " VAL
// The architecture of Llama, which all the families below share.
#define LLAMA "--norm rms --bias off --positions rope --activation swiglu "
// A small Llama that trains for a minute or two.
#define SMALL LLAMA "--steps 2000 --lr 2e-3 --warmup 100 "
// SpanNorm (arXiv 2601.22580), and its depth stress test at width 384.
#define SPAN_TRAINING \
    "--vocab 32000 --seq 2048 --init scale --init-std 0.02 --lr 2e-4 --min-lr 0.1 --warmup 200 " VAL
#define SPAN_ LLAMA "--tied on " SPAN_TRAINING
#define STRESS SPAN_ "--batch 256 --init-std 0 --steps 5000 "
#define SPAN_D384(layers) STRESS SIZE(layers, 384, 6) "--ffn 1056"
// HybridNorm (arXiv 2503.04598) and SDD (arXiv 2502.15499), which both train as OLMo does.
#define OLMO "--batch 1024 --decay-gains zero " VAL
#define OLMO_TRAINING \
    LLAMA OLMO "--tied on --vocab 100278 --seq 4096 --rope-theta 500000 --lr 3e-4 " \
    "--warmup 2000 --decay-embeddings off "
#define HYB_ OLMO_TRAINING "--init-baseline normal --min-lr 0.1 --kv-heads 4 "
#define SDD_ OLMO_TRAINING "--init-baseline depth --min-lr 0.05 --kv-heads 8 "
// Mixture of experts: OLMoE, with a softmax router and losses that balance its load, and DeepSeek,
// with latent attention, shared experts and a selection bias that balances without a loss.
// K of E routed experts for each token.
#define EXPERTS(E, K) "--experts " #E " --experts-per-token " #K " "
#define SOFTMAX \
    "--tied off --router softmax --balance-loss 0.01 --router-z-loss 0.001 --router-losses mean "
#define OLMOE \
    LLAMA SOFTMAX EXPERTS(64, 8) OLMO "--vocab 50280 --seq 4096 --init-baseline normal " \
    "--lr 4e-4 --min-lr 0.125 --warmup 2500 --decay-embeddings on "
#define OLMOE_CHAR SMALL SOFTMAX SIZE(4, 128, 4) "--seq 64 --batch 16 "
#define DEEPSEEK \
    "--tied off --router sigmoid --balance-loss 0 --router-z-loss 0 --sequence-loss 1e-4 " \
    "--router-losses sum --balance-rate 0.001 --shared-experts 2 --dense-layers 1 --eps 1e-6 "

// Name, flags, note.
const Preset PRESETS[] = {
    // For two CPU cores: the built-in stories, or bytes of your own text.
    {"stories", LLAMA SIZE(4, 128, 4) "--seq 128 --batch 8 --steps 600 --lr 2.5e-3 --warmup 60 "
     "--min-lr 0.05 --val-every 200 --val-tokens 32768 --temperature 0.6 --sample 600",
     "the built-in corpus in about a minute on two cores"},
    {"nanogpt-char", GPT2_BLOCK SIZE(4, 128, 4) "--bias off --seq 64 --batch 12 --steps 2000 "
     "--lr 1e-3 --min-lr 0.1 --warmup 100 --beta2 0.99 --init scale --init-std 0.02",
     "nanoGPT's CPU recipe for TinyShakespeare: bytes, no dropout; LayerNorm keeps its bias, "
     "GELU is the tanh form"},
    {"llama-char", SMALL SIZE(6, 192, 6) "--kv-heads 2 --seq 128 --batch 16",
     "a small Llama for bytes of your own text"},
    {"deep-char", LLAMA SIZE(24, 128, 4) "--seq 64 --batch 12 --steps 800 --lr 3e-3 --warmup 200 "
     "--init scale",
     "24 narrow layers with the branch sizes of SpanNorm's 740M"},
    // OpenAI's GPT-2 in its four sizes.
    {"gpt2-124M", GPT2 SIZE(12, 768, 12),
     "GPT-2 small; training as llm.c's FineWeb recipe, 10B tokens"},
    {"gpt2-350M", GPT2 SIZE(24, 1024, 16), "GPT-2 medium"},
    {"gpt2-774M", GPT2 SIZE(36, 1280, 20), "GPT-2 large"},
    {"gpt2-1558M", GPT2 SIZE(48, 1600, 25), "GPT-2 XL"},
    // SpanNorm's dense models, then narrow ones for its stress test in depth and its width proxy.
    {"span-740M", SPAN_ SIZE(24, 1536, 24) "--ffn 4224 --batch 256 --steps 57220",
     "SpanNorm 740M, 512K tokens a step; minimum rate open: 0.1"},
    {"span-1.3B", SPAN_ SIZE(48, 1536, 24) "--ffn 4224 --batch 512 --steps 95367",
     "SpanNorm 1.3B"},
    {"span-5B", SPAN_ SIZE(64, 2560, 40) "--ffn 6912 --batch 2048 --steps 47684",
     "SpanNorm 5B; HYBRID and Peri-LN, which is Gemma 2's there (SANDWICH): --lr 1e-4"},
    {"span-6.5B", SPAN_ SIZE(128, 2048, 32) "--ffn 5504 --batch 2048 --lr 1.2e-4 --steps 95367",
     "SpanNorm 128 layers; dimensions and batch open: these give 6.54B"},
    {"span-d384-32", SPAN_D384(32),
     "SpanNorm depth stress; heads, ffn, batch and steps open; sigma keeps the 740M's branch "
     "sizes"},
    {"span-d384-64", SPAN_D384(64), ""},
    {"span-d384-128", SPAN_D384(128), ""},
    {"span-d384-256", SPAN_D384(256), ""},
    {"span-d384-512", SPAN_D384(512), ""},
    {"span-d640", STRESS SIZE(64, 640, 10) "--ffn 1728 --init-std 0.04",
     "SpanNorm's width proxy of the 5B; batch open; sigma sqrt(width) is the 5B's"},
    // HybridNorm.
    {"hybrid-151M", HYB_ SIZE(12, 768, 16) "--ffn 2048 --steps 47684", "HybridNorm"},
    {"hybrid-285M", HYB_ SIZE(12, 1024, 16) "--ffn 4096 --steps 47684", ""},
    {"hybrid-550M", HYB_ SIZE(16, 1536, 16) "--ffn 4096 --steps 71526",
     "300B tokens, of figure 6; 400B in tables 3 to 5"},
    {"hybrid-543M", HYB_ SIZE(29, 1024, 16) "--ffn 4096 --steps 95367", "29 layers"},
    {"hybrid-1.2B", HYB_ SIZE(16, 2048, 32) "--kv-heads 8 --ffn 9192 --steps 238419",
     "ffn as in the paper; the released configuration has 8192"},
    // Scale-Distribution Decoupling.
    {"sdd-581M", SDD_ SIZE(8, 2048, 32) "--ffn 8192 --steps 47684",
     "dimensions open: these give 692M with the embedding, 487M without"},
    {"sdd-1B", SDD_ SIZE(16, 2048, 32) "--ffn 8192 --steps 476837",
     "SDD 1B; the released configuration ends at 0.1 of the rate, the paper at 0.05; its "
     "PreNorm has norms of q and k (PRE_QK_PRE)"},
    {"sdd-7B", SDD_ SIZE(32, 4096, 32) "--ffn 11008 --steps 953674",
     "SDD 7B; the paper prints the fused ffn width 22016"},
    // Mixture of experts, and miniatures that train on bytes.
    {"olmoe-588M-3B", OLMOE SIZE(32, 1024, 16) "--ffn 512 --init-baseline depth --min-lr 0.05 "
     "--steps 59605",
     "SDD's MoE of 588M active, 3.4B in all: they count one embedding and no router"},
    {"olmoe-1B-7B", OLMOE SIZE(16, 2048, 16) "--ffn 1024 --steps 119209",
     "OLMoE (NORM_MODE=OLMOE); HybridNorm's and SDD's MoE"},
    {"deepseek-16B", LLAMA DEEPSEEK SPAN_TRAINING SIZE(27, 2048, 16) EXPERTS(64, 6)
     "--kv-rank 512 --rope-size 64 --ffn 1408 --dense-ffn 10944 --batch 2048 --steps 47684",
     "SpanNorm's A2.4B-16B: DeepSeek-V3's small model; router, losses and batch open"},
    {"olmoe-char", OLMOE_CHAR EXPERTS(8, 2) "--ffn 128",
     "miniature of OLMoE: 8 experts, 2 a token"},
    {"olmoe64-char", OLMOE_CHAR EXPERTS(64, 8) "--ffn 32",
     "64 narrow experts, 8 a token, as OLMoE has"},
    {"deepseek-char", SMALL DEEPSEEK SIZE(5, 128, 4) EXPERTS(16, 4)
     "--kv-rank 32 --rope-size 16 --ffn 64 --dense-ffn 384 --seq 64 --batch 16",
     "miniature of DeepSeek's small model: latent attention, 16 experts, 4 a token, 2 shared"},
    {0},
};

// Similar names are collected in case none matches. The name becomes the value of --model, so
// config.json keeps it.
void flags_preset(FlagSet *set, const char *name) {
    Nearest near = nearest_begin(name);
    const Preset *p = PRESETS;
    for (; p->name && strcmp(p->name, name); p++) nearest_add(&near, p->name, p->name);
    CHECK(p->name, "no model named %s\n  -> %s./train_gpt --show models lists them", name,
          near.text);
    flags_parse_text(set, p->flags, BY_PRESET);
    flag_set(set, &FLAGS[FLAG_model], name, BY_PRESET);
}
