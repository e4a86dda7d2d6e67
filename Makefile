# norm.c
#   make train_gpt NORM_MODE=SPAN && ./train_gpt   the trainer under one placement of llmc/modes.h
#   make shard                                     the program that turns text into token shards
#   make test | test-all                           tests; none needs a GPU (dev/test/README.md)
#   make bench                                     a training step on this CPU, layer by layer
#   make test_gpt_cuda                             the tests of CUDA code, built for a GPU
#   make arch-check | clean                        registers and spills of every kernel, no GPU
# Options
#   DEVICE=cpu|cuda   default: cuda where nvcc and a GPU are found (dev/device.sh decides)
#   PREC=...          CPU: fp32 (default), bf16 or fp64;  GPU: bf16 (default) or fp32
#   ARCH=90a,120      GPUs to build for; default: the ones in this machine
#   OMP=0             without OpenMP
#   CC= CFLAGS= NVCC= CUDA=the toolkit's folder  CUBLAS=the folder of cublasLt.h

NORM_MODE ?= SPAN
OMP       ?= 1
CFLAGS    ?= -O3 $(call accepts,-march=native)

# $(call accepts,FLAG): the flag if the C compiler accepts it, otherwise nothing.
accepts = $(shell echo 'int x;' | $(CC) -Werror -c $(1) -x c - -o /dev/null 2>/dev/null \
          && echo $(1))
# $(call stamp,FILE,TEXT): rewrites build/FILE if the text has changed, so that its targets rebuild.
stamp = $(shell mkdir -p build && echo '$(2)' > build/$(1).new && \
                { cmp -s build/$(1).new build/$(1) || cp build/$(1).new build/$(1); })
comma := ,

# ---------------------------------------------------------------------------- what to build for

MODES := $(shell sed -n 's/^MODE. *\([A-Z0-9_]*\),.*/\1/p' llmc/modes.h)
MODE  := $(patsubst FUSE,SPAN,$(NORM_MODE))
ifeq ($(filter $(MODE),$(MODES)),)
$(error NORM_MODE=$(NORM_MODE) is not a placement; known are: $(MODES); FUSE is SPAN)
endif

# CUDA headers: from CUDA= and CUBLAS=, else the toolkit's, else those of dev/setup.sh --all.
GIVEN_CUBLAS := $(CUBLAS)
HEADERS := $(shell CUDA='$(CUDA)'; CUBLAS='$(CUBLAS)'; . dev/cuda_headers.sh; echo $$CUDA $$CUBLAS)
CUDA    := $(word 1,$(HEADERS))
CUBLAS  := $(word 2,$(HEADERS))

# dev/device.sh chooses CPU or GPU, for those goals that may be either. ARCH counts only on the
# command line: in some environments a variable of that name means something else.
GOALS := $(filter all train_gpt binary test_gpt_cuda build/cuda-%,$(or $(MAKECMDGOALS),all))
ifneq ($(GOALS),)
WANTED := $(or $(DEVICE),$(if $(filter-out all train_gpt binary,$(GOALS)),cuda))
FOUND  := $(shell CUDA='$(CUDA)' NVCC='$(NVCC)' DEVICE='$(WANTED)' PREC='$(PREC)' \
                  ARCH='$(if $(filter command,$(origin ARCH)),$(ARCH))' sh dev/device.sh)
ifeq ($(firstword $(FOUND)),stop)
$(error $(wordlist 2,99,$(FOUND)))
endif
ON    := $(word 1,$(FOUND))
NVCC  := $(word 2,$(FOUND))
ARCHS := $(shell echo $(word 3,$(FOUND)) | tr , ' ')
PREC  := $(word 4,$(FOUND))
WHY   := $(wordlist 5,99,$(FOUND))
else
ON    := cpu
PREC  ?= fp32
endif
NAME := $(shell echo $(ON)-$(MODE)-$(PREC) | tr A-Z a-z)

# ---------------------------------------------------------------------------- compilers

# bf16 on the CPU rounds only the operands of matrix products; on a GPU, weights and activations.
CPU_fp32    := -DREAL=float -DPREC=fp32
CPU_fp64    := -DREAL=double -DPREC=fp64
CPU_bf16    := -DREAL=float -DPREC=bf16 -DBF16_PRODUCTS
DEVICE_fp32 := -DREAL=float -DPREC=fp32
DEVICE_bf16 := -DREAL=__nv_bfloat16 -DPREC=bf16

# Never fast-math. -fno-math-errno and -fno-trapping-math change no value, and let loops with exp
# vectorize. -ffp-contract=fast rounds a b + c once, which -std=c17 alone forbids gcc.
# -fno-thread-jumps keeps the clamps of exp.h one minimum and one maximum. gcc otherwise computes
# each end apart, where a sigmoid is a denormal number: 14 times slower on Intel's CPUs.
OPENMP := $(or $(if $(filter 1,$(OMP)),$(call accepts,-fopenmp)),$(call accepts,-fopenmp-simd))
FLAGS  := -std=c17 -D_DEFAULT_SOURCE -D_XOPEN_SOURCE=700 $(CFLAGS) -ffp-contract=fast \
          -fno-math-errno -fno-trapping-math -pthread $(OPENMP) -Wall -Wextra \
          $(call accepts,-fno-thread-jumps) $(call accepts,-Wno-unknown-pragmas) \
          $(call accepts,-Wno-pass-failed) $(call accepts,-Wno-psabi) -MMD -MP

# The commit reaches train_gpt.c and train_gpt.cu alone: a commit recompiles nothing else.
GIT      := $(shell git describe --always --dirty --exclude '*' 2>/dev/null || echo unknown)
GIT_HASH  = -DGIT_HASH='"$(GIT)"'
SERVICES := $(patsubst llmc/run/%.c,build/run/%.o,$(wildcard llmc/run/*.c)) build/stories.o
STAMPS   := $(call stamp,flags,$(CC) $(FLAGS) $(SERVICES)) $(call stamp,git,$(GIT))

# Names in build/: <device>-<mode>-<precision>/. $(call mode_of,STEM) and $(call prec_of,STEM).
mode_of = -DNORM_MODE=MODE_$(shell echo $(firstword $(subst -, ,$(1))) | tr a-z A-Z)
prec_of = $(lastword $(subst -, ,$(1)))

# The sources and objects of a program. Not $^, which has the headers that build/*.d adds.
INPUTS = $(filter %.c %.cu,$<) $(filter %.o %.a,$^)

# ---------------------------------------------------------------------------- programs

all: train_gpt shard

train_gpt: build/$(NAME)/train_gpt
	@ln -sf $< $@
	@echo "./train_gpt is $< ($(if $(filter cuda,$(ON)),CUDA$(comma) $(ARCHS:%=sm_%),CPU): $(WHY))"
# The same without the link ./train_gpt, for programs that need several trainers (dev/ablate.py).
binary: build/$(NAME)/train_gpt
	@echo $<

# Services (llmc/run) and the built-in corpus: one archive for every mode, precision and device.
build/run/%.o: llmc/run/%.c build/flags
	@mkdir -p $(@D)
	$(CC) $(FLAGS) -c $< -o $@
build/stories.o: data/stories.c build/flags
	$(CC) $(FLAGS) -c $< -o $@
build/services.a: $(SERVICES)
	@rm -f $@
	$(AR) rcs $@ $^

build/cpu-%/train_gpt.o: train_gpt.c build/flags build/git
	@mkdir -p $(@D)
	$(CC) $(FLAGS) $(CPU_$(call prec_of,$*)) $(call mode_of,$*) $(GIT_HASH) -c $< -o $@
build/cpu-%/train_gpt: build/cpu-%/train_gpt.o build/services.a
	$(CC) $(FLAGS) $(INPUTS) -o $@ -lm

shard: build/shard
	@ln -sf $< $@
build/shard: data/shard.c build/services.a
	$(CC) $(FLAGS) $(INPUTS) -o $@ -lm

bench: build/bench-fp32 build/bench-bf16
	build/bench-fp32
	build/bench-bf16
build/bench-%: dev/bench/cpu/bench.c build/services.a
	$(CC) $(FLAGS) $(CPU_$*) $(INPUTS) -o $@ -lm

arch-check:
	NVCC='$(NVCC)' sh dev/arch_check.sh

# ---------------------------------------------------------------------------- tests

# build/bench-fp32 is compiled here, not run.
test: build/test_gpt build/shard build/words build/faulty build/shim.so build/bench-fp32 \
      build/cpu-span-fp32/train_gpt
	sh dev/test/run.sh

test-all: test
	sh dev/test/all.sh

clean:
	rm -rf build train_gpt shard

.PHONY: all train_gpt binary shard bench test test-all test_gpt_cuda arch-check clean
.SECONDARY:

include dev/test/tests.mk dev/test/emu.mk $(if $(filter cuda,$(ON)),dev/nvcc.mk)
DEPENDENCIES := $(wildcard build/*.d build/*/*.d)
$(DEPENDENCIES): ;
-include $(DEPENDENCIES)
