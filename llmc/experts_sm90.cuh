// experts_sm90.cuh: the grouped products of moe.cuh for compute capability 9.0, by wgmma and TMA
// (sm90.cuh). Equations, sizes and the layout of all arrays are those of moe.cuh; bfloat16.
//
// A tile has 128 rows and 256 columns of the result. A multiprocessor runs one block, which takes
// every gridDim.x-th tile of the list. It is a producer and two consumers, each a warpgroup. The
// producer fills a ring of stages, 64 of the depth each, and runs ahead into the next tile; for
// each stage two mbarriers say that it is full, or empty again. A consumer owns 64 rows of the
// tile. Its sums stay in registers; the producer gives up most of its own for them.
//
//             left, 128 rows             right, 256 columns         steps of the depth
//   FORWARD   x, copied, by rows         W_e, by columns            in
//   INPUT     dy, by rows                W_e, by rows               rows of W_e, part by part
//   WEIGHT    dy, by columns             x, copied, by rows         the expert's rows
//
// TMA brings W_e and dy. It cannot gather: rows of x lie where `source` says, and end with their
// expert. So the producer's threads copy x by cp.async, 16 bytes each to the place that the swizzle
// gives them. A thread waits for a step's copies while those of the next two are under way. Then
// fence_async makes them visible to wgmma. Rows of x beyond the expert's last one are zeros, and so
// is all beyond a matrix's edge.
//
// Boxes of dy run on into the next expert's rows. INPUT drops those rows, WEIGHT multiplies them by
// zeros: a NaN or infinity there makes dW of both experts NaN, and the step is not applied.
#pragma once
#include "moe.cuh"
#include "sm90.cuh"

enum { BOX_BYTES = TILE_WIDTH * TILE_ROW };  // of 64 rows, what TMA copies at once

struct GroupedSizes {
    static constexpr int ROWS = ROW_TILE, COLUMNS = 256, DEPTH = TILE_WIDTH;
    static constexpr int STAGES = 4;
    static constexpr int AHEAD = 2;              // steps whose copies are under way during a wait
    static constexpr int CONSUMERS = ROWS / GROUP_ROWS, WARPS = CONSUMERS * WARPGROUP / WARP;
    static constexpr int THREADS = (CONSUMERS + 1) * WARPGROUP;
    // Registers of a thread after the producer has given most of its own to the consumers.
    static constexpr int PRODUCERS = 56, CONSUMERS_OWN = 224;
    static constexpr int LEFT = ROWS / TILE_WIDTH * BOX_BYTES;
    static constexpr int RIGHT = COLUMNS / TILE_WIDTH * BOX_BYTES, STAGE = LEFT + RIGHT;
    // Results of a warp on their way to memory.
    static constexpr int ROOM = 16 * TILE_PITCH<TILE_WIDTH> * sizeof(real);
    static constexpr int BYTES = STAGES * STAGE + WARPS * ROOM + 2 * STAGES * 8;
    static_assert(BYTES <= 227 << 10, "fewer stages");
    static_assert(AHEAD < STAGES - 1, "a stage is given back only after the next step is full");
};

// dy [rows, parts, width] and W [parts, E, width, in]
struct GroupedMaps { CUtensorMap dy, w; };

// A tile of a result.
struct GroupedTile {
    int expert;                // -1: this tile and all further ones are not needed
    int part;                  // FORWARD, WEIGHT: the part of W
    int first, end;            // WEIGHT: all rows of the expert; otherwise those from the tile on
    int row, column;           // the tile's first; within the part: WEIGHT's row, FORWARD's column
    int steps;                 // of the depth
};

// Tiles side by side.
template <int FORM> __host__ __device__ int grouped_across(const Experts &e) {
    if (FORM == FORWARD) return e.parts * CEIL_DIV(e.width, GroupedSizes::COLUMNS);
    return CEIL_DIV(e.in, GroupedSizes::COLUMNS);
}

template <int FORM> __device__ GroupedTile grouped_tile(const Experts &e, int number) {
    typedef GroupedSizes G;
    int across = grouped_across<FORM>(e), down = number / across, i = number % across;
    GroupedTile t = {};
    t.column = i * G::COLUMNS;
    if (FORM == WEIGHT) {
        int each = CEIL_DIV(e.width, G::ROWS), all = e.parts * each;
        t.expert = down / all;
        t.part = down % all / each;
        t.row = down % each * G::ROWS;
        t.first = e.start[t.expert];
        t.end = e.start[t.expert + 1];
        t.steps = CEIL_DIV(t.end - t.first, G::DEPTH);
        return t;
    }
    t.expert = e.tiles[2 * down];
    t.first = t.row = e.tiles[2 * down + 1];
    if (t.expert < 0) return t;
    t.end = e.start[t.expert + 1];
    t.steps = e.parts * CEIL_DIV(e.width, G::DEPTH);
    if (FORM == FORWARD) {
        int each = across / e.parts;
        t.part = i / each;
        t.column = i % each * G::COLUMNS;
        t.steps = CEIL_DIV(e.in, G::DEPTH);
    }
    return t;
}

// ---------------------------------------------------------------------------------------- producer

// The rows of x of which a thread copies 16 bytes: threadIdx.x / 8 + 16 i of a tile. -1: zeros.
template <int ROWS> struct CopiedRows {
    static constexpr int APART = WARPGROUP / 8, COUNT = ROWS / APART;
    int row[COUNT];
    __device__ void find(const Experts &e, int first, int end) {
        UNROLL for (int i = 0; i < COUNT; i++) {
            int at = first + threadIdx.x / 8 + i * APART;
            row[i] = at < end ? at : -1;
            if (at < end && e.source) row[i] = e.source[at];
        }
    }
    // Starts the copies of 64 columns of x to a tile, from `column` on.
    __device__ void copy(unsigned char *tile, const real *x, int in, int column) const {
        int at = threadIdx.x % 8 * 8;
        UNROLL for (int i = 0; i < COUNT; i++) {
            bool present = row[i] >= 0 && column + at < in;
            copy_async(tile_at(tile, threadIdx.x / 8 + i * APART, at),
                       present ? x + (int64_t)row[i] * in + column + at : x, present);
        }
    }
};

template <int FORM> struct GroupedProducer {
    typedef GroupedSizes G;
    const GroupedMaps &maps;
    const Grouped &f;
    unsigned char *stages;
    RingBarriers ring;
    Ring<G::STAGES> at, behind;    // the stage to fill; the one whose copies are waited for
    int begun;                     // steps
    CopiedRows<FORM == FORWARD ? G::ROWS : G::DEPTH> rows;

    // How many arrivals fill a stage: one for the bytes of TMA, and one of each thread that copies.
    static constexpr int FILLERS = FORM == INPUT ? 1 : 1 + WARPGROUP;

    __device__ void load(unsigned char *left, unsigned char *right, const GroupedTile &t,
                         int step) const {
        uint64_t *full = ring.full + at.stage;
        int part = t.part, k = step * G::DEPTH;
        if (FORM == INPUT) {
            int each = CEIL_DIV(f.e.width, G::DEPTH);
            part = step / each;
            k = step % each * G::DEPTH;
        }
        mbarrier_expect(full, (FORM == FORWARD ? 0 : G::LEFT) + (FORM == WEIGHT ? 0 : G::RIGHT));
        for (int i = 0; i < G::LEFT / BOX_BYTES && FORM != FORWARD; i++)
            if (FORM == INPUT)
                tma_load(left + i * BOX_BYTES, &maps.dy, full, k, part, t.row + i * TILE_WIDTH, 0);
            else
                tma_load(left + i * BOX_BYTES, &maps.dy, full, t.row + i * TILE_WIDTH, part,
                         t.first + k, 0);
        for (int i = 0; i < G::RIGHT / BOX_BYTES && FORM != WEIGHT; i++) {
            int column = t.column + i * TILE_WIDTH;
            if (FORM == FORWARD)
                tma_load(right + i * BOX_BYTES, &maps.w, full, k, column, t.expert, part);
            else tma_load(right + i * BOX_BYTES, &maps.w, full, column, k, t.expert, part);
        }
    }

    // Ends the copies of a step, and arrives for the stage of AHEAD steps before it.
    __device__ void copies_end(void) {
        copy_commit();
        copy_wait<G::AHEAD>();
        if (++begun <= G::AHEAD) return;
        fence_async();
        mbarrier_arrive(ring.full + behind.stage);
        behind.next();
    }

    // Fills a stage with a step of a tile as soon as it is empty.
    __device__ void fill(const GroupedTile &t, int step) {
        unsigned char *left = stages + at.stage * G::STAGE, *right = left + G::LEFT;
        int k = step * G::DEPTH;
        mbarrier_wait(ring.empty + at.stage, at.parity ^ 1);
        if (threadIdx.x == 0) load(left, right, t, step);
        at.next();
        if (FORM == INPUT) return;
        if (FORM == FORWARD) rows.copy(left, f.left, f.e.in, k);
        if (FORM == WEIGHT) {
            UNROLL for (int i = 0; i < G::RIGHT / BOX_BYTES; i++)
                rows.copy(right + i * BOX_BYTES, f.right, f.e.in, t.column + i * TILE_WIDTH);
            rows.find(f.e, t.first + k + G::DEPTH, t.end);  // of the next step
        }
        copies_end();
    }

    __device__ void run(int tiles) {
        if (FORM == INPUT && threadIdx.x > 0) return;
        for (int n = blockIdx.x; n < tiles; n += gridDim.x) {
            GroupedTile t = grouped_tile<FORM>(f.e, n);
            if (t.expert < 0) break;
            if (FORM != INPUT) rows.find(f.e, t.first, t.end);
            for (int step = 0; step < t.steps; step++) fill(t, step);
        }
        for (int i = 0; i < G::AHEAD && FORM != INPUT; i++) copies_end();
    }
};

// --------------------------------------------------------------------------------------- consumers

// The wgmma descriptor of 16 of the depth, from 16 k on, of an operand that begins at `tiles`.
template <Major M> __device__ uint64_t operand_descriptor(const unsigned char *tiles, int k) {
    if (M == MAJOR_K) return tile_descriptor(tiles + k * STEP_BYTES);
    return tile_descriptor(tiles + k * 16 * TILE_ROW, BOX_BYTES);
}

template <int FORM> struct GroupedConsumer {
    typedef GroupedSizes G;
    const Grouped &f;
    const unsigned char *stages;
    real *room;                    // ROOM bytes of this warp
    RingBarriers ring;
    int group;                     // 0 or 1
    float d[G::COLUMNS / 2];

    // y = c d, from the warp's first row and the tile's first column on, which `y` points to. There
    // are `rows` rows and `columns` columns from there. 64 columns at a time pass through the room,
    // so that a warp writes whole rows of 128 bytes.
    __device__ void y_store(real *y, int ld, int rows, int columns) const {
        UNROLL for (int column = 0; column < G::COLUMNS; column += TILE_WIDTH) {
            Strips<1, TILE_WIDTH> sums;
            UNROLL for (int i = 0; i < TILE_WIDTH / 2; i++)
                sums.v[0][i] = f.e.c * d[column / 2 + i];
            rows_store(y + column, ld, rows, room, sums, columns - column);
        }
    }

    __device__ void store(const GroupedTile &t) const {
        int row = t.row + group * GROUP_ROWS;
        if (FORM == WEIGHT) {
            // An expert without rows leaves dW as it is, or SETs it to 0.
            int first = t.part * f.e.width;
            if (t.steps > 0 || f.e.to_dw == SET)
                dw_store(f.e, t.expert, d, first + row + group_row(), first + f.e.width, t.column);
            return;
        }
        row += threadIdx.x % WARPGROUP / WARP * 16;
        int ld = FORM == FORWARD ? f.e.parts * f.e.width : f.e.in;
        int columns = (FORM == FORWARD ? f.e.width : f.e.in) - t.column;
        int column = (FORM == FORWARD ? t.part * f.e.width : 0) + t.column;
        y_store(f.y + (int64_t)row * ld + column, ld, t.end - row, columns);
    }

    // The sums of a tile. A stage is given back when the products of the next one have begun.
    __device__ void multiply(const GroupedTile &t, Ring<G::STAGES> &at) {
        constexpr Major A = FORM == WEIGHT ? MAJOR_MN : MAJOR_K;
        constexpr Major B = FORM == FORWARD ? MAJOR_K : MAJOR_MN;
        Ring<G::STAGES> before = at;
        UNROLL for (int i = 0; i < G::COLUMNS / 2; i++) d[i] = 0;
        settle(d);
        for (int step = 0; step < t.steps; step++, at.next()) {
            const unsigned char *stage = stages + at.stage * G::STAGE;
            const unsigned char *left = stage + group * BOX_BYTES, *right = stage + G::LEFT;
            mbarrier_wait(ring.full + at.stage, at.parity);
            wgmma_fence();
            UNROLL for (int k = 0; k < G::DEPTH / 16; k++)
                wgmma<A, B>(d, operand_descriptor<A>(left, k), operand_descriptor<B>(right, k),
                            true);
            wgmma_commit();
            wgmma_wait<1>();
            if (step > 0) stage_release(ring, before);
            before = at;
        }
        wgmma_wait<0>();
        settle(d);
        if (t.steps > 0) stage_release(ring, before);
    }

    __device__ void run(int tiles) {
        Ring<G::STAGES> at = {0, 0};
        for (int n = blockIdx.x; n < tiles; n += gridDim.x) {
            GroupedTile t = grouped_tile<FORM>(f.e, n);
            if (t.expert < 0) break;
            multiply(t, at);
            store(t);
        }
    }
};

template <int FORM>
__global__ void __launch_bounds__(GroupedSizes::THREADS, 1)
grouped_sm90_kernel(const __grid_constant__ GroupedMaps maps, Grouped f, int tiles) {
#if SM90_CODE
    typedef GroupedSizes G;
    typedef GroupedProducer<FORM> Producer;
    SHARED_TILES(stages);
    unsigned char *rooms = stages + G::STAGES * G::STAGE;
    uint64_t *full = reinterpret_cast<uint64_t *>(rooms + G::WARPS * G::ROOM);
    RingBarriers ring = {full, full + G::STAGES};
    if (threadIdx.x == 0) {
        ring_init<G::STAGES>(ring, Producer::FILLERS);
        mbarrier_init_fence();
    }
    __syncthreads();
    int group = warpgroup_index() - 1;  // -1: the producer
    if (group < 0) {
        registers_give<G::PRODUCERS>();
        Producer{maps, f, stages, ring, {0, 0}, {0, 0}, 0, {}}.run(tiles);
        return;
    }
    registers_take<G::CONSUMERS_OWN>();
    unsigned char *room = rooms + (threadIdx.x / WARP - WARPGROUP / WARP) * G::ROOM;
    GroupedConsumer<FORM>{f, stages, reinterpret_cast<real *>(room), ring, group, {}}.run(tiles);
#endif
}

// ---------------------------------------------------------------------------------------- launcher

template <int FORM> static inline void grouped_launch_sm90(const Grouped &f, Gpu *gpu) {
    typedef GroupedSizes G;
    const Experts &e = f.e;
    int down = e.E * e.parts * CEIL_DIV(e.width, G::ROWS);  // of WEIGHT
    if (FORM != WEIGHT) down = row_tiles(e.rows, e.E);
    int tiles = down * grouped_across<FORM>(e);
    int64_t width = e.width, in = e.in, out = e.parts * width;
    TensorBox dy = {f.left, {width, e.parts, e.rows, 1}, {width, out, e.rows * out},
                    {TILE_WIDTH, 1, TILE_WIDTH, 1}};
    TensorBox w = {f.right, {in, width, e.E, e.parts}, {in, width * in, e.E * width * in},
                   {TILE_WIDTH, TILE_WIDTH, 1, 1}};
    // A form without one of them has the other twice.
    GroupedMaps maps = {tensor_map(FORM == FORWARD ? w : dy), tensor_map(FORM == WEIGHT ? dy : w)};
    LAUNCH(grouped_sm90_kernel<FORM>, min(tiles, gpu->processors), G::THREADS, G::BYTES,
           gpu->stream, maps, f, tiles);
}
