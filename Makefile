# norm.c
#   make train_gpt NORM_MODE=SPAN && ./train_gpt    the trainer for one placement (llmc/modes.h lists them), as ./train_gpt
#   make shard                                      text files -> token shards
#   make test | test-all | clean
# Options: PREC=fp32|fp64   CC=gcc|clang   OMP=0 (no OpenMP)   CFLAGS=...

NORM_MODE ?= SPAN
PREC      ?= fp32
OMP       ?= 1
CFLAGS    ?= -O3 $(call accepts,-march=native)

MODES := $(shell sed -n 's/^MODE. *\([A-Z0-9_]*\),.*/\1/p' llmc/modes.h)
MODE  := $(patsubst FUSE,SPAN,$(NORM_MODE))
ifeq ($(filter $(MODE),$(MODES)),)
$(error NORM_MODE=$(NORM_MODE) is not a placement; known are: $(MODES); FUSE is SPAN)
endif
REAL_fp32 := float
REAL_fp64 := double
ifeq ($(REAL_$(PREC)),)
$(error PREC=$(PREC): expected fp32 or fp64)
endif

# A compiler flag, where the compiler takes it.
accepts = $(shell echo 'int x;' | $(CC) -c $(1) -x c - -o /dev/null 2>/dev/null && echo $(1))
OPENMP := $(or $(if $(filter 1,$(OMP)),$(call accepts,-fopenmp)),$(call accepts,-fopenmp-simd))
# Never fast-math. These two only say that nobody reads errno after sqrt and nobody traps; no value changes, and loops with exp vectorize.
FLAGS  := -std=c17 -D_XOPEN_SOURCE=700 $(CFLAGS) -fno-math-errno -fno-trapping-math $(OPENMP) -Wall -Wextra $(call accepts,-Wno-unknown-pragmas) $(call accepts,-Wno-pass-failed) -MMD -MP
GIT    := $(shell git describe --always --dirty --exclude '*' 2>/dev/null || echo unknown)
NAME   := $(shell echo cpu-$(MODE)-$(PREC) | tr A-Z a-z)

# Rebuild when the compiler, its flags or the commit change.
STAMP := $(shell mkdir -p build && echo '$(CC) $(FLAGS)' > build/flags.new && { cmp -s build/flags.new build/flags || cp build/flags.new build/flags; }; \
                 echo '$(GIT)' > build/git.new && { cmp -s build/git.new build/git || cp build/git.new build/git; })

all: train_gpt shard

train_gpt: build/$(NAME)/train_gpt
	@ln -sf $< $@
	@echo "./train_gpt is $< (CPU)"
.PHONY: all train_gpt shard test test-all clean

build/$(NAME)/train_gpt: train_gpt.c build/stories.o build/flags build/git
	@mkdir -p $(@D)
	$(CC) $(FLAGS) -DREAL=$(REAL_$(PREC)) -DPREC=$(PREC) -DNORM_MODE=MODE_$(MODE) -DGIT_HASH='"$(GIT)"' $< build/stories.o -o $@ -lm

shard: build/shard
	@ln -sf $< $@

build/shard: data/shard.c build/flags
	$(CC) $(FLAGS) $< -o $@ -lm

build/stories.o: data/stories.c build/flags
	$(CC) $(FLAGS) -c $< -o $@

# The judge in both precisions, its main out of the way, for the tests.
build/judge_%.o: train_gpt.c build/flags
	$(CC) $(FLAGS) -DREAL=$(REAL_$*) -DPREC=$* -Dmain=main_$* -c $< -o $@

TESTS := $(patsubst dev/test/%.c,build/%.o,$(wildcard dev/test/test_*.c))
build/test_%.o: dev/test/test_%.c build/flags
	$(CC) $(FLAGS) -c $< -o $@
build/test_gpt.o: test_gpt.c build/flags
	$(CC) $(FLAGS) -c $< -o $@
build/test_gpt: build/test_gpt.o $(TESTS) build/judge_fp32.o build/judge_fp64.o build/stories.o
	$(CC) $(FLAGS) $^ -o $@ -lm

build/words: dev/test/words.c build/stories.o build/flags
	$(CC) $(FLAGS) $< build/stories.o -o $@ -lm

build/tokenize: dev/test/tokenize.c build/flags
	$(CC) $(FLAGS) $< -o $@ -lm

# The tests drive the default trainer; ./train_gpt stays what it was.
test: build/test_gpt build/shard build/words
	@$(MAKE) --no-print-directory build/cpu-span-fp32/train_gpt NORM_MODE=SPAN PREC=fp32
	sh dev/test/run.sh

test-all: test
	sh dev/test/all.sh

clean:
	rm -rf build train_gpt shard

DEPENDENCIES := $(wildcard build/*.d build/*/*.d)
$(DEPENDENCIES): ;
-include $(DEPENDENCIES)
