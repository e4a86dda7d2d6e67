# norm.c
#   make train_gpt NORM_MODE=SPAN && ./train_gpt    the trainer for one placement (llmc/modes.h lists them), as ./train_gpt; for a GPU where there is one
#   make shard                                      text files -> token shards
#   make test | test-all | clean                    no GPU needed
#   make bench                                      what a training step costs on this CPU, layer by layer, beside what the CPU can do
#   make test_gpt_cuda | arch-check                 the tests for a machine with a GPU; nvcc's word on every kernel, without one
# Options: DEVICE=cpu|cuda   ARCH=90a,120 (GPUs to build for)   PREC=fp32|bf16|fp64 (CPU), bf16|fp32 (GPU)   OMP=0 (no OpenMP)
#          CC=gcc|clang   CFLAGS=...   NVCC=...   CUBLAS=the folder of cublasLt.h

NORM_MODE ?= SPAN
OMP       ?= 1
CUDA      ?= /usr/local/cuda
CUBLAS    ?= $(CUDA)/include
CFLAGS    ?= -O3 $(call accepts,-march=native)

comma := ,
MODES := $(shell sed -n 's/^MODE. *\([A-Z0-9_]*\),.*/\1/p' llmc/modes.h)
MODE  := $(patsubst FUSE,SPAN,$(NORM_MODE))
ifeq ($(filter $(MODE),$(MODES)),)
$(error NORM_MODE=$(NORM_MODE) is not a placement; known are: $(MODES); FUSE is SPAN)
endif
# What to build for, and why: dev/device.sh looks and decides, for the goals that ask. A line of the environment is not an ARCH.
GOALS := $(filter all train_gpt binary test_gpt_cuda build/cuda-%,$(or $(MAKECMDGOALS),all))
ifneq ($(GOALS),)
FOUND := $(shell CUDA='$(CUDA)' NVCC='$(NVCC)' DEVICE='$(or $(DEVICE),$(if $(filter-out all train_gpt binary,$(GOALS)),cuda))' PREC='$(PREC)' \
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
# On the CPU the precision of everything, except that bf16 is of the products alone; on a GPU the type weights and activations are kept in.
CPU_fp32 := -DREAL=float -DPREC=fp32
CPU_fp64 := -DREAL=double -DPREC=fp64
CPU_bf16 := -DREAL=float -DPREC=bf16 -DBF16_PRODUCTS
DEVICE_fp32 := float
DEVICE_bf16 := __nv_bfloat16

# A compiler flag, where the compiler takes it.
accepts = $(shell echo 'int x;' | $(CC) -c $(1) -x c - -o /dev/null 2>/dev/null && echo $(1))
OPENMP := $(or $(if $(filter 1,$(OMP)),$(call accepts,-fopenmp)),$(call accepts,-fopenmp-simd))
# Never fast-math. Two only say that nobody reads errno after sqrt and nobody traps; no value changes, and loops with exp vectorize. -ffp-contract
# lets a b + c be one instruction with one rounding, which -std=c17 forbids gcc.
FLAGS  := -std=c17 -D_DEFAULT_SOURCE -D_XOPEN_SOURCE=700 $(CFLAGS) -ffp-contract=fast -fno-math-errno -fno-trapping-math -pthread $(OPENMP) -Wall -Wextra $(call accepts,-Wno-unknown-pragmas) $(call accepts,-Wno-pass-failed) $(call accepts,-Wno-psabi) -MMD -MP
GIT    := $(shell git describe --always --dirty --exclude '*' 2>/dev/null || echo unknown)
NAME   := $(shell echo $(ON)-$(MODE)-$(PREC) | tr A-Z a-z)

# Rebuild when the compiler, its flags or the commit change.
STAMP := $(shell mkdir -p build && echo '$(CC) $(FLAGS)' > build/flags.new && { cmp -s build/flags.new build/flags || cp build/flags.new build/flags; }; \
                 echo '$(GIT)' > build/git.new && { cmp -s build/git.new build/git || cp build/git.new build/git; })

# The services, compiled once for all modes and precisions.
RUN := $(patsubst llmc/run/%.c,build/run/%.o,$(wildcard llmc/run/*.c)) build/stories.o

all: train_gpt shard

train_gpt: build/$(NAME)/train_gpt
	@ln -sf $< $@
	@echo "./train_gpt is $< ($(if $(filter cuda,$(ON)),CUDA$(comma) $(ARCHS:%=sm_%),CPU): $(WHY))"
# The same under its own name alone, and says that: for who keeps several (dev/ablate.py).
binary: build/$(NAME)/train_gpt
	@echo $<
.PHONY: all train_gpt binary shard test test-all arch-check clean

# GPU_TESTS: which of dev/test/test_*.cu the tests of a GPU, real or emulated, are built from; by default all, and the models.
GPU_TESTS ?= $(patsubst dev/test/test_%.cu,%,$(wildcard dev/test/test_*.cu))
ifeq ($(ON),cpu)
build/$(NAME)/train_gpt: train_gpt.c $(RUN) build/flags build/git
	@mkdir -p $(@D)
	$(CC) $(FLAGS) $(CPU_$(PREC)) -DNORM_MODE=MODE_$(MODE) -DGIT_HASH='"$(GIT)"' $< $(RUN) -o $@ -lm
else
# For the GPUs of ARCHS alone. Products are cuBLASLt's. Never fast-math here either: kernels call the fast functions they mean by name.
LT := $(firstword $(wildcard $(addsuffix /cublasLt.h,$(CUBLAS) $(dir $(NVCC))../include /usr/include)))
ifeq ($(LT),)
$(error cublasLt.h is neither in $(CUBLAS) nor in $(dir $(NVCC))../include: expected CUBLAS=its folder; it comes with the CUDA toolkit (Debian, Ubuntu: libcublas-dev-13-0))
endif
NVCC_HOST  := -pthread -Wall -Wextra -Wno-unknown-pragmas -fno-math-errno -fno-trapping-math $(if $(filter 1,$(OMP)),-fopenmp,-fopenmp-simd)
NVCC_FLAGS := -std=c++17 -O3 -lineinfo $(foreach a,$(ARCHS),-gencode arch=compute_$(a)$(comma)code=sm_$(a)) -I$(LT:/cublasLt.h=) -Xcompiler "$(NVCC_HOST)" -MMD -MP
# The library that belongs to the header: in lib64 of a toolkit, in lib of NVIDIA's Python packages, where its name has a version; else wherever the linker finds it.
LT_FILE := $(firstword $(foreach name,libcublasLt.so libcublasLt.so.*,$(wildcard $(addsuffix /$(name),$(LT:/cublasLt.h=/../lib64) $(LT:/cublasLt.h=/../lib)))))
LINK_LT := $(if $(LT_FILE),-L$(abspath $(dir $(LT_FILE))) -Xlinker -rpath=$(abspath $(dir $(LT_FILE)))) $(if $(filter-out %.so,$(LT_FILE)),-l:$(notdir $(LT_FILE)),-lcublasLt)
NVCC_STAMP := $(shell echo '$(NVCC) $(NVCC_FLAGS)' > build/nvcc.new && { cmp -s build/nvcc.new build/nvcc || cp build/nvcc.new build/nvcc; })

# build/cuda-<mode>-<precision>/train_gpt, so that one make can build several (dev/gpu_check.sh).
build/cuda-%/train_gpt: train_gpt.cu $(RUN) build/nvcc build/git
	@mkdir -p $(@D)
	$(NVCC) $(NVCC_FLAGS) -DREAL=$(DEVICE_$(lastword $(subst -, ,$*))) -DPREC=$(lastword $(subst -, ,$*)) \
		-DNORM_MODE=MODE_$(shell echo $(firstword $(subst -, ,$*)) | tr a-z A-Z) -DGIT_HASH='"$(GIT)"' $< $(RUN) -o $@ $(LINK_LT)

build/cuda-bench/kernels: dev/bench/gpu/kernels.cu build/nvcc
	@mkdir -p $(@D)
	$(NVCC) $(NVCC_FLAGS) -DREAL=__nv_bfloat16 -DPREC=bf16 $< -o $@ $(LINK_LT)

# What the emulator runs (below), on the GPU: every layer and every mode against the judge.
test_gpt_cuda: build/cuda-test/test_gpt-fp32 build/cuda-test/test_gpt-bf16
.PHONY: test_gpt_cuda
define CUDA_RULES
build/cuda-test/model-$(1).o: train_gpt.cu build/nvcc
	@mkdir -p $$(@D)
	$(NVCC) $(NVCC_FLAGS) -DREAL=$(DEVICE_$(1)) -DPREC=$(1) -Dmain=main_$(1) -c $$< -o $$@
build/cuda-test/%-$(1).o: dev/test/%.cu build/nvcc
	@mkdir -p $$(@D)
	$(NVCC) $(NVCC_FLAGS) -DREAL=$(DEVICE_$(1)) -DPREC=$(1) -c $$< -o $$@
build/cuda-test/%-$(1).o: %.cu build/nvcc
	@mkdir -p $$(@D)
	$(NVCC) $(NVCC_FLAGS) -DREAL=$(DEVICE_$(1)) -DPREC=$(1) -c $$< -o $$@
build/cuda-test/test_gpt-$(1): $(patsubst %,build/cuda-test/%-$(1).o,gpu_main test_gpt model $(GPU_TESTS:%=test_%)) build/judge_fp64.o $(RUN)
	$(NVCC) $(NVCC_FLAGS) $$^ -o $$@ $(LINK_LT)
endef
$(eval $(call CUDA_RULES,fp32))
$(eval $(call CUDA_RULES,bf16))
endif

# What nvcc makes of every kernel: registers, spills and warnings, for four generations of GPUs; no GPU needed.
arch-check:
	CUDA=$(CUDA) CUBLAS=$(CUBLAS) sh dev/arch_check.sh

# What a training step costs on this CPU, and what the CPU can do; dev/bench/cpu/README.md reads the tables.
bench: build/bench-fp32 build/bench-bf16
	build/bench-fp32
	build/bench-bf16
.PHONY: bench
build/bench-%: dev/bench/cpu/bench.c $(RUN) build/flags build/git
	$(CC) $(FLAGS) $(CPU_$*) -DGIT_HASH='"$(GIT)"' $< $(RUN) -o $@ -lm

shard: build/shard
	@ln -sf $< $@

build/shard: data/shard.c $(RUN) build/flags
	$(CC) $(FLAGS) $< $(RUN) -o $@ -lm

build/run/%.o: llmc/run/%.c build/flags
	@mkdir -p $(@D)
	$(CC) $(FLAGS) -c $< -o $@

build/stories.o: data/stories.c build/flags
	$(CC) $(FLAGS) -c $< -o $@

# The judge in every precision, its main out of the way, for the tests.
build/judge_%.o: train_gpt.c build/flags
	$(CC) $(FLAGS) $(CPU_$*) -Dmain=main_$* -c $< -o $@

TESTS := $(patsubst dev/test/%.c,build/%.o,$(wildcard dev/test/test_*.c))
build/test_%.o: dev/test/test_%.c build/flags
	$(CC) $(FLAGS) -c $< -o $@
build/test_gpt.o: test_gpt.c build/flags
	$(CC) $(FLAGS) -c $< -o $@
build/test_gpt: build/test_gpt.o $(TESTS) build/judge_fp32.o build/judge_bf16.o build/judge_fp64.o $(RUN)
	$(CC) $(FLAGS) $^ -o $@ -lm

build/faulty: dev/test/faulty.c build/judge_fp32.o $(RUN) build/flags
	$(CC) $(FLAGS) $(CPU_fp32) $< build/judge_fp32.o $(RUN) -o $@ -lm

build/$(NAME)/scores: dev/test/scores.c build/judge_fp32.o $(RUN) build/flags
	@mkdir -p $(@D)
	$(CC) $(FLAGS) $(CPU_fp32) -DNORM_MODE=MODE_$(MODE) $< build/judge_fp32.o $(RUN) -o $@ -lm

build/shim.so: dev/test/shim.c build/flags
	$(CC) $(FLAGS) -shared -fPIC $< -o $@

build/words: dev/test/words.c $(RUN) build/flags
	$(CC) $(FLAGS) $< $(RUN) -o $@ -lm

build/tokenize: dev/test/tokenize.c $(RUN) build/flags
	$(CC) $(FLAGS) $< $(RUN) -o $@ -lm

build/logits: dev/test/logits.c build/judge_fp32.o $(RUN) build/flags
	$(CC) $(FLAGS) $< build/judge_fp32.o $(RUN) -o $@ -lm

# The CUDA files in the emulator (dev/emu): every test of a GPU, without one. EMU: where to build; EMU_FLAGS='-O1 -g': for a debugger, twice as long to compile.
EMU       ?= build/emu
EMU_CXX   ?= g++
EMU_FLAGS ?= -O1
EMU_ALL   := -std=c++17 -pthread -D_DEFAULT_SOURCE -D_XOPEN_SOURCE=700 $(EMU_FLAGS) -fno-strict-aliasing -Wall -Wextra -Wno-unknown-pragmas -isystem $(CUDA)/include -isystem $(CUBLAS) -MMD -MP
EMU_OBJECTS := $(EMU)/emu.o $(EMU)/cublaslt.o
$(EMU)/%.o: dev/emu/%.cpp
	@mkdir -p $(@D)
	$(EMU_CXX) -std=c++17 -O2 -g -Wall -Wextra -isystem $(CUDA)/include -isystem $(CUBLAS) -MMD -MP -c $< -o $@
# NCCL is found at run time, by LD_LIBRARY_PATH=$(EMU); it calls the emulator in the program that loads it.
$(EMU)/libnccl.so.2: dev/emu/nccl.cpp
	@mkdir -p $(@D)
	$(EMU_CXX) -std=c++17 -O2 -g -Wall -Wextra -isystem $(CUDA)/include -fPIC -shared -Wl,-soname,libnccl.so.2 $< -o $@
$(EMU)/test_nccl: dev/emu/test_nccl.cpp $(EMU_OBJECTS) $(EMU)/libnccl.so.2
	$(EMU_CXX) -std=c++17 -O1 -g -Wall -Wextra -isystem $(CUDA)/include -rdynamic -Wl,-rpath,$(abspath $(EMU)) $^ -o $@
define EMU_RULES
$(EMU)/%-$(1).o: dev/test/%.cu
	@mkdir -p $$(@D)
	$(EMU_CXX) $(EMU_ALL) -DREAL=$(DEVICE_$(1)) -DPREC=$(1) -x c++ -include dev/emu/emu.h -c $$< -o $$@
$(EMU)/%-$(1).o: %.cu
	@mkdir -p $$(@D)
	$(EMU_CXX) $(EMU_ALL) -DREAL=$(DEVICE_$(1)) -DPREC=$(1) -x c++ -include dev/emu/emu.h -c $$< -o $$@
$(EMU)/model-$(1).o: train_gpt.cu
	@mkdir -p $$(@D)
	$(EMU_CXX) $(EMU_ALL) -DREAL=$(DEVICE_$(1)) -DPREC=$(1) -Dmain=main_$(1) -x c++ -include dev/emu/emu.h -c $$< -o $$@
$(EMU)/kernels-$(1): dev/bench/gpu/kernels.cu $(EMU_OBJECTS)
	@mkdir -p $$(@D)
	$(EMU_CXX) $(EMU_ALL) -DREAL=$(DEVICE_$(1)) -DPREC=$(1) -x c++ -include dev/emu/emu.h $$< -x none $(EMU_OBJECTS) -o $$@
$(EMU)/test_gpt-$(1): $(EMU)/gpu_main-$(1).o $(patsubst %,$(EMU)/test_%-$(1).o,$(GPU_TESTS)) $(if $(filter file,$(origin GPU_TESTS)),$(EMU)/test_gpt-$(1).o $(EMU)/model-$(1).o build/judge_fp64.o $(RUN)) $(EMU_OBJECTS)
	$(EMU_CXX) $(EMU_FLAGS) -fopenmp $$^ -o $$@
$(EMU)/ngpt-$(1).o: train_gpt.cu
	@mkdir -p $$(@D)
	$(EMU_CXX) $(EMU_ALL) -O0 -DREAL=$(DEVICE_$(1)) -DPREC=$(1) -DNORM_MODE=MODE_NGPT -x c++ -include dev/emu/emu.h -c $$< -o $$@
$(EMU)/train_gpt-$(1) $(EMU)/ngpt-$(1): $(EMU)/%-$(1): $(EMU)/%-$(1).o $(RUN) $(EMU_OBJECTS)
	$(EMU_CXX) $(EMU_FLAGS) -rdynamic $$^ -o $$@
endef
$(eval $(call EMU_RULES,fp32))
$(eval $(call EMU_RULES,bf16))
.SECONDARY:

# The tests drive the default trainer; ./train_gpt stays what it was.
test: build/test_gpt build/shard build/words build/faulty build/shim.so
	@$(MAKE) --no-print-directory build/cpu-span-fp32/train_gpt NORM_MODE=SPAN PREC=fp32
	sh dev/test/run.sh

test-all: test
	sh dev/test/all.sh

clean:
	rm -rf build train_gpt shard

DEPENDENCIES := $(wildcard build/*.d build/*/*.d)
$(DEPENDENCIES): ;
-include $(DEPENDENCIES)
