# The CUDA files in the emulator (dev/emu): every test of a GPU, without one. Included by the
# Makefile; dev/test/emu.sh builds and runs it.
#   EMU=FOLDER           where to build; other compilers and flags need another folder
#   EMU_FLAGS='-O1 -g'   for a debugger; compiling takes twice as long
EMU         ?= build/emu
EMU_CXX     ?= g++
EMU_FLAGS   ?= -O1
EMU_HEADERS := -isystem $(CUDA)/include -isystem $(CUBLAS)
EMU_OBJECTS := $(EMU)/emu.o $(EMU)/cublaslt.o
EMU_WARN    := -Wall -Wextra -Wno-unknown-pragmas -Wno-psabi

# A .cu file as C++, with the emulator in place of the CUDA runtime.
EMU_COMPILE := $(EMU_CXX) -std=c++17 -pthread -D_DEFAULT_SOURCE -D_XOPEN_SOURCE=700 $(EMU_FLAGS) \
               -fno-strict-aliasing $(EMU_WARN) $(EMU_HEADERS) -MMD -MP \
               -x c++ -include dev/emu/emu.h

# The emulator itself, the same for all flags. NCCL is found at run time by LD_LIBRARY_PATH=$(EMU);
# it calls the emulator in the program that loads it, hence -rdynamic.
$(EMU)/%.o: dev/emu/%.cpp
	@mkdir -p $(@D)
	$(EMU_CXX) -std=c++17 -O2 -g -Wall -Wextra $(EMU_HEADERS) -MMD -MP -c $< -o $@
$(EMU)/libnccl.so.2: dev/emu/nccl.cpp
	@mkdir -p $(@D)
	$(EMU_CXX) -std=c++17 -O2 -g -Wall -Wextra $(EMU_HEADERS) -fPIC -shared \
		-Wl,-soname,libnccl.so.2 $< -o $@
$(EMU)/test_nccl: dev/emu/test_nccl.cpp $(EMU_OBJECTS) $(EMU)/libnccl.so.2
	$(EMU_CXX) -std=c++17 -O1 -g -Wall -Wextra $(EMU_HEADERS) -rdynamic \
		-Wl,-rpath,$(abspath $(EMU)) $^ -o $@

# With GPU_TESTS= given by hand, the tests of those layers alone, without whole models.
define EMU_RULES
EMU_LAYERS_$(1) := $(patsubst %,$(EMU)/%-$(1).o,gpu_main $(GPU_TESTS:%=test_%))
EMU_MODELS_$(1) := $(EMU)/test_gpt-$(1).o $(EMU)/model-$(1).o build/judge_fp64.o

$(EMU)/%-$(1).o: dev/test/%.cu
	@mkdir -p $$(@D)
	$(EMU_COMPILE) $(DEVICE_$(1)) -c $$< -o $$@
$(EMU)/%-$(1).o: %.cu
	@mkdir -p $$(@D)
	$(EMU_COMPILE) $(DEVICE_$(1)) -c $$< -o $$@
$(EMU)/model-$(1).o: train_gpt.cu
	@mkdir -p $$(@D)
	$(EMU_COMPILE) $(DEVICE_$(1)) -Dmain=main_$(1) -c $$< -o $$@
$(EMU)/ngpt-$(1).o: train_gpt.cu
	@mkdir -p $$(@D)
	$(EMU_COMPILE) -O0 $(DEVICE_$(1)) -DNORM_MODE=MODE_NGPT -c $$< -o $$@

$(EMU)/test_gpt-$(1): $$(EMU_LAYERS_$(1)) \
        $(if $(filter file,$(origin GPU_TESTS)),$$(EMU_MODELS_$(1))) \
        $(EMU_OBJECTS) build/services.a
	$(EMU_CXX) $(EMU_FLAGS) -fopenmp $$^ -o $$@
$(EMU)/train_gpt-$(1) $(EMU)/ngpt-$(1): $(EMU)/%-$(1): $(EMU)/%-$(1).o \
        $(EMU_OBJECTS) build/services.a
	$(EMU_CXX) $(EMU_FLAGS) -fopenmp -rdynamic $$^ -o $$@
$(EMU)/kernels-$(1) $(EMU)/timeline-$(1): $(EMU)/%-$(1): dev/bench/gpu/%.cu $(EMU_OBJECTS) \
        build/services.a
	@mkdir -p $$(@D)
	$(EMU_COMPILE) -fopenmp -rdynamic $(DEVICE_$(1)) $$< -x none $(EMU_OBJECTS) build/services.a -o $$@
endef
$(eval $(call EMU_RULES,fp32))
$(eval $(call EMU_RULES,bf16))
