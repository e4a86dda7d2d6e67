# Everything that nvcc compiles, for the GPUs of ARCHS alone: train_gpt, the timer of kernels, the
# tests of CUDA code. Included by the Makefile where it builds for a GPU.

# cuBLASLt's header: the folder given, the toolkit of this nvcc, the toolkit in CUDA, the system.
LT := $(firstword $(wildcard $(addsuffix /cublasLt.h,\
                  $(GIVEN_CUBLAS) $(dir $(NVCC))../include $(CUBLAS) /usr/include)))
ifeq ($(LT),)
$(error cublasLt.h is neither in $(CUBLAS) nor in $(dir $(NVCC))../include: expected CUBLAS=its \
        folder; it comes with the CUDA toolkit (Debian, Ubuntu: libcublas-dev-13-0))
endif
LT := $(LT:/cublasLt.h=)

# The library that belongs to this header: in lib64 of a toolkit, in lib of NVIDIA's Python
# packages, where its name ends in a version; otherwise wherever the linker finds it.
LT_NAMES  := $(addprefix $(LT)/../lib64/,libcublasLt.so libcublasLt.so.*) \
             $(addprefix $(LT)/../lib/,libcublasLt.so libcublasLt.so.*)
LT_FILE   := $(firstword $(wildcard $(LT_NAMES)))
LT_FOLDER := $(realpath $(dir $(LT_FILE)))
LINK_LT   := $(if $(LT_FILE),-L$(LT_FOLDER) -Xlinker -rpath=$(LT_FOLDER)) \
             $(if $(filter-out %.so,$(LT_FILE)),-l:$(notdir $(LT_FILE)),-lcublasLt)

# Never fast-math here either: kernels call the fast functions that they mean by name.
NVCC_HOST  := -pthread -Wall -Wextra -Wno-unknown-pragmas -fno-math-errno -fno-trapping-math \
              $(if $(filter 1,$(OMP)),-fopenmp,-fopenmp-simd)
GENCODE    := $(foreach a,$(ARCHS),-gencode arch=compute_$(a)$(comma)code=sm_$(a))
NVCC_FLAGS := -std=c++17 -O3 -lineinfo $(GENCODE) -I$(LT) -Xcompiler "$(NVCC_HOST)" -MMD -MP
NVCC_STAMP := $(call stamp,nvcc,$(NVCC) $(NVCC_FLAGS))

# build/cuda-<mode>-<precision>/train_gpt: one make can build several (dev/gpu_check.sh).
build/cuda-%/train_gpt.o: train_gpt.cu build/nvcc build/git
	@mkdir -p $(@D)
	$(NVCC) $(NVCC_FLAGS) $(DEVICE_$(call prec_of,$*)) $(call mode_of,$*) $(GIT_HASH) -c $< -o $@
build/cuda-%/train_gpt: build/cuda-%/train_gpt.o build/services.a
	$(NVCC) $(NVCC_FLAGS) $(INPUTS) -o $@ $(LINK_LT)

build/cuda-bench/kernels: dev/bench/gpu/kernels.cu build/services.a build/nvcc
	@mkdir -p $(@D)
	$(NVCC) $(NVCC_FLAGS) $(DEVICE_bf16) $(INPUTS) -o $@ $(LINK_LT)

# The trainer that records its launches, and the library that records those of any program. CUPTI
# itself is found when that runs (dev/bench/gpu/times.sh).
build/cuda-timeline-%/train_gpt.o: dev/bench/gpu/timeline.cu build/nvcc build/git
	@mkdir -p $(@D)
	$(NVCC) $(NVCC_FLAGS) $(DEVICE_$(call prec_of,$*)) $(call mode_of,$*) $(GIT_HASH) -c $< -o $@
CUPTI_H := $(firstword $(wildcard $(addsuffix /cupti.h,$(CUPTI) $(CUDA)/extras/CUPTI/include \
                       $(CUDA)/include $(dir $(NVCC))../extras/CUPTI/include \
                       $(dir $(NVCC))../include)))
build/cuda-bench/libtimeline.so: dev/bench/gpu/cupti.cpp
	@mkdir -p $(@D)
	$(CXX) -std=c++17 -O2 -Wall -Wextra -fPIC -shared -I$(dir $(CUPTI_H)) -I$(CUDA)/include \
		$< -o $@

# The tests that dev/test/emu.mk builds for the emulator: every layer and mode against the judge.
# layers-*: those of four layers and of both kinds of their kernels, which build in a minute.
FIRST_TESTS := attention linear norm moe kinds
test_gpt_cuda: build/cuda-test/test_gpt-fp32 build/cuda-test/test_gpt-bf16
define NVCC_TESTS
build/cuda-test/model-$(1).o: train_gpt.cu build/nvcc
	@mkdir -p $$(@D)
	$(NVCC) $(NVCC_FLAGS) $(DEVICE_$(1)) -Dmain=main_$(1) -c $$< -o $$@
build/cuda-test/%-$(1).o: dev/test/%.cu build/nvcc
	@mkdir -p $$(@D)
	$(NVCC) $(NVCC_FLAGS) $(DEVICE_$(1)) -c $$< -o $$@
build/cuda-test/%-$(1).o: %.cu build/nvcc
	@mkdir -p $$(@D)
	$(NVCC) $(NVCC_FLAGS) $(DEVICE_$(1)) -c $$< -o $$@
build/cuda-test/test_gpt-$(1): \
        $(patsubst %,build/cuda-test/%-$(1).o,gpu_main test_gpt model $(GPU_TESTS:%=test_%)) \
        build/judge_fp64.o build/services.a
	$(NVCC) $(NVCC_FLAGS) $$(INPUTS) -o $$@ $(LINK_LT)
build/cuda-test/layers-$(1): \
        $(patsubst %,build/cuda-test/%-$(1).o,gpu_main $(FIRST_TESTS:%=test_%)) build/services.a
	$(NVCC) $(NVCC_FLAGS) $$(INPUTS) -o $$@ $(LINK_LT)
endef
$(eval $(call NVCC_TESTS,fp32))
$(eval $(call NVCC_TESTS,bf16))
