// A pass of Llama-shaped decoder layers over a few tokens: packed matrices, norms, RoPE, caches, attention over trees.
//
// Contract: every result belongs to one token, and its bits depend on that token's own inputs and on the keys that it
// sees, in the order of their positions; never on which other tokens are in the pass, on where in the buffers its keys
// lie, or on the number of threads. So a token read as a node of a tree gets what it would get read alone.
//
// How: sums run along one token in a fixed order. Scores of all slots are computed alike, those that the token sees are
// then moved side by side, and exponentials, their sum and the mix of values run over these. No fast-math.
//
// Layouts, row-major. Caches (float32): keys [B, kv, L/16, D, 16], values [B, kv, L, D], L a multiple of 64. Matrices
// [N, K] in panels of 32 outputs: fp32 and fp16 [N/32, K, 32]; int8 [N/32, K/4, 32, 4]; N is padded with zeros.
// Rows as int8 are stored with 128 added, for the processor's unsigned-by-signed products. H, F, D, K: multiples of 16.
//
// Glossary: T tokens (rows), H hidden width, F width of the MLP, D head width, L slots, K inputs, N outputs.

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#if defined(__AVX512F__) || defined(__F16C__) || defined(__AVX2__)
#include <immintrin.h>
#endif
#if defined(__AMX_INT8__) && defined(__AMX_TILE__) && defined(__AVX512F__) && defined(__linux__)
#define AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif

typedef float vec __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(64), aligned(4), may_alias));

static const int LANES = 16, BLOCK = 64;

static inline vec splat(float x) { return vec{} + x; }
static inline vec load(const float* p) { return *(const vec*)p; }
static inline void store(float* p, vec x) { *(vec*)p = x; }
static inline vec vmax(vec a, vec b) { return a > b ? a : b; }
static inline vec vabs(vec a) { return a < 0 ? -a : a; }

static inline float sum_lanes(vec v) {
    float s = 0;
    for (int i = 0; i < LANES; i++) s += v[i];
    return s;
}
static inline float max_lanes(vec v) {
    float m = v[0];
    for (int i = 1; i < LANES; i++) m = v[i] > m ? v[i] : m;
    return m;
}

// Whether a comparison holds in any lane.
static inline bool any(ivec mask) {
    int64_t words[8], all = 0;
    memcpy(words, &mask, sizeof words);
    for (int i = 0; i < 8; i++) all |= words[i];
    return all != 0;
}

// e^x: x = n ln 2 + r, a Taylor polynomial in r; relative error 2e-7. Clamped to what float32 can hold.
static inline vec vexp(vec x) {
    const float magic = 12582912.0f;  // adding it rounds to a whole number
    x = x < -87.0f ? splat(-87.0f) : x;
    x = x > 88.0f ? splat(88.0f) : x;
    vec shifted = x * 1.44269504088896341f + magic;
    vec n = shifted - magic;
    vec r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    vec p = splat(1.0f / 5040);
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    ivec power = (ivec)shifted - (ivec)splat(magic);
    return p * (vec)((power + 127) << 23);
}

// A row as int8, in blocks with a scale each: x = scale * (q - 128), |q - 128| <= 127.
static void quantize_row(const float* x, int64_t width, int64_t block, uint8_t* q, float* scale) {
    for (int64_t start = 0; start < width; start += block, scale++) {
        vec top = {};
        for (int64_t i = start; i < start + block; i += LANES) top = vmax(top, vabs(load(x + i)));
        const float most = max_lanes(top), factor = most > 1e-30f ? 127.0f / most : 0.0f;
        *scale = most / 127.0f;
        for (int64_t i = start; i < start + block; i++) q[i] = (uint8_t)(int32_t)(__builtin_rintf(x[i] * factor) + 128.0f);
    }
}

struct Matrix {
    int64_t n, k;
    int64_t kind;          // 0 fp32, 1 fp16, 2 int8
    int64_t block;         // int8: inputs that share a scale, a divisor of K
    const void* weight;    // in panels
    const float* scale;    // int8: [N], of the outputs
    const int32_t* sums;   // int8: [K/block, N], 128 times the sum of an output's weights in a block
};

struct Layer {
    const float* input_norm;  // or NULL
    Matrix qkv;
    const float *bias, *q_norm, *k_norm;  // or NULL
    Matrix out;
    const float* mlp_norm;
    Matrix gate_up, down;
};

struct Stack {
    int64_t layers, hidden, inner, heads, kv, dim, activation;  // activation: 0 silu, 1 gelu (tanh)
    const Layer* layer;
    float eps, softmax_scale;
};

// A draft head, EAGLE or EAGLE-3: the latter has no fc (n is 0), its first layer's qkv reads E + H inputs.
struct Head {
    int64_t embedding;                        // E
    const float *embed_norm, *feature_norm;   // of what it reads, or NULL
    Matrix fc;                                // [H, E + H]
    const float* bias;                        // of fc, or NULL
    Stack stack;
    const float* output_norm;                 // before the read-out, or NULL
    Matrix readout;
};

// One pass's tokens, T of them, of up to B rows of the caches.
struct Pass {
    int64_t tokens, length, threads;  // length: L
    int64_t layer_stride;             // between the caches of two layers, floats
    const int32_t* row;       // [T] row of the caches
    const int32_t* slot;      // [T] where its key and value go
    const int32_t* position;  // [T] row of the tables cos and sin
    const int32_t* prefix;    // [T] slots 0 .. prefix-1 are seen
    const int32_t* path;      // [T+1] then it sees the slots seen[path[t]] .. seen[path[t+1]-1], ascending
    const int32_t* seen;
    const float *cos, *sin;   // [positions, D/2]
    float *keys, *values;
    float* x;                 // [T, H] inputs; the result: the residual stream behind the last layer
    float *y, *wide, *delta;  // scratch [T, max(H, F, heads D)], [T, max((heads + 2 kv) D, 2 F)], [T, H]
    uint8_t* q;               // scratch [T, max(H, F, heads D)]
    float* q_scale;           // scratch [T, blocks of the widest row]
    float** streams;          // [layers] where to copy the stream that enters each layer; NULL, or NULLs
};

// Rows of activations: float32, or int8 with scales, one per block.
struct Rows {
    const float* x;
    const uint8_t* q;
    const float* scale;
};

static const int PANEL = 32, MOST_ROWS = 12;

#ifdef __AVX512F__
static inline vec widen(const uint16_t* p) { return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
#elif defined(__F16C__)
static inline vec widen(const uint16_t* p) {
    const __m256 both[2] = {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)),
                            _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
    vec out;
    memcpy(&out, both, sizeof out);
    return out;
}
#else
static inline vec widen(const uint16_t* p) {
    vec out;
    for (int i = 0; i < LANES; i++) {
        uint32_t sign = (uint32_t)(p[i] & 0x8000) << 16, rest = (uint32_t)(p[i] & 0x7fff) << 13;
        float f;
        memcpy(&f, &rest, 4);
        f *= 5.192296858534828e33f;  // 2^112 moves the exponent's bias; subnormals come out right
        memcpy(&rest, &f, 4);
        rest |= sign;
        memcpy(&f, &rest, 4);
        out[i] = f;
    }
    return out;
}
#endif

// acc[i] += x[0..3] . w[i][0..3] for 16 outputs; x unsigned, w signed; exact.
#if defined(__AVX512VNNI__)
static inline ivec dot4(ivec acc, int32_t x, const int8_t* w) {
    return (ivec)_mm512_dpbusd_epi32((__m512i)acc, _mm512_set1_epi32(x), _mm512_loadu_si512(w));
}
#elif defined(__AVX2__)
static inline ivec dot4(ivec acc, int32_t x, const int8_t* w) {
    const __m256i pairs = _mm256_cvtepu8_epi16(_mm_set1_epi32(x));
    __m256i sums[2];
    for (int i = 0; i < 2; i++) {
        __m256i a = _mm256_madd_epi16(pairs, _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(w + 32 * i))));
        __m256i b = _mm256_madd_epi16(pairs, _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(w + 32 * i + 16))));
        sums[i] = _mm256_permute4x64_epi64(_mm256_hadd_epi32(a, b), 0xd8);
    }
    ivec both;
    memcpy(&both, sums, sizeof both);
    return acc + both;
}
#else
static inline ivec dot4(ivec acc, int32_t x, const int8_t* w) {
    uint8_t u[4];
    memcpy(u, &x, 4);
    for (int i = 0; i < LANES; i++)
        acc[i] += u[0] * w[4 * i] + u[1] * w[4 * i + 1] + u[2] * w[4 * i + 2] + u[3] * w[4 * i + 3];
    return acc;
}
#endif

// out + scale * (dot - sums): a block's part of 16 outputs.
static inline vec add_block(vec out, ivec dot, const int32_t* sums, float scale) {
    return out + __builtin_convertvector(dot - *(const ivec*)sums, vec) * scale;
}

// R rows times one panel: y [R rows of N], at most 32 outputs of each.
template <int R>
static void panel(const Matrix& m, int64_t number, int64_t t, const Rows& rows, float* y) {
    const int64_t K = m.k, first = number * PANEL, count = m.n - first < PANEL ? m.n - first : PANEL;
    vec out[R][2];
    if (m.kind == 2) {
        const int8_t* w = (const int8_t*)m.weight + first * K;
        const int64_t blocks = K / m.block, padded = (m.n + PANEL - 1) / PANEL * PANEL;
        for (int r = 0; r < R; r++) out[r][0] = out[r][1] = vec{};
        for (int64_t b = 0; b < blocks; b++) {
            ivec acc[R][2] = {};
            for (int64_t k = b * m.block; k < (b + 1) * m.block; k += 4, w += 4 * PANEL) {
                __builtin_prefetch(w + 4096), __builtin_prefetch(w + 4096 + 64);
                for (int r = 0; r < R; r++) {
                    int32_t x;
                    memcpy(&x, rows.q + (t + r) * K + k, 4);
                    acc[r][0] = dot4(acc[r][0], x, w);
                    acc[r][1] = dot4(acc[r][1], x, w + 64);
                }
            }
            for (int r = 0; r < R; r++)
                for (int i = 0; i < 2; i++)
                    out[r][i] = add_block(out[r][i], acc[r][i], m.sums + b * padded + first + i * LANES,
                                          rows.scale[(t + r) * blocks + b]);
        }
        for (int r = 0; r < R; r++)
            for (int i = 0; i < 2; i++) out[r][i] = out[r][i] * load(m.scale + first + i * LANES);
    } else {
        const float* w = (const float*)m.weight + first * K;
        const uint16_t* h = (const uint16_t*)m.weight + first * K;
        vec acc[R][2] = {};
        if (m.kind == 0)
            for (int64_t k = 0; k < K; k++, w += PANEL) {
                __builtin_prefetch(w + 1024), __builtin_prefetch(w + 1024 + LANES);
                for (int r = 0; r < R; r++) {
                    const float x = rows.x[(t + r) * K + k];
                    acc[r][0] = acc[r][0] + load(w) * x;
                    acc[r][1] = acc[r][1] + load(w + LANES) * x;
                }
            }
        else
            for (int64_t k = 0; k < K; k++, h += PANEL) {
                __builtin_prefetch(h + 2048);
                const vec w0 = widen(h), w1 = widen(h + LANES);
                for (int r = 0; r < R; r++) {
                    const float x = rows.x[(t + r) * K + k];
                    acc[r][0] = acc[r][0] + w0 * x;
                    acc[r][1] = acc[r][1] + w1 * x;
                }
            }
        for (int r = 0; r < R; r++) out[r][0] = acc[r][0], out[r][1] = acc[r][1];
    }
    for (int r = 0; r < R; r++) memcpy(y + (t + r) * m.n + first, out[r], count * sizeof(float));
}

#ifdef AMX
// The kernel lets a process use the tile registers once it has asked.
static bool tiles_allowed() {
    static const bool allowed = syscall(SYS_arch_prctl, 0x1023, 18) == 0;
    return allowed;
}

struct alignas(64) TileShapes {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
};

static void set_tiles(int64_t rows) {  // 0 to 3: sums, two by two; 4, 5: rows; 6, 7: weights
    TileShapes shapes = {};
    shapes.palette = 1;
    const uint8_t first = (uint8_t)(rows < 16 ? rows : 16), second = (uint8_t)(rows > 16 ? rows - 16 : 1);
    for (int i = 0; i < 8; i++) shapes.bytes[i] = 64, shapes.rows[i] = 16;
    shapes.rows[0] = shapes.rows[1] = shapes.rows[4] = first;
    shapes.rows[2] = shapes.rows[3] = shapes.rows[5] = second;
    _tile_loadconfig(&shapes);
}

// Up to 32 rows times one panel of an int8 matrix, blocks of a multiple of 64; the results of `panel`, bit for bit.
static void tiles(const Matrix& m, int64_t number, int64_t t, int64_t count, const Rows& rows, float* y) {
    const int64_t K = m.k, first = number * PANEL, width = m.n - first < PANEL ? m.n - first : PANEL;
    const int64_t blocks = K / m.block, padded = (m.n + PANEL - 1) / PANEL * PANEL;
    const int8_t* w = (const int8_t*)m.weight + first * K;
    const uint8_t* x = rows.q + t * K;
    const bool two = count > 16;
    alignas(64) int32_t sums[2][32][16];
    alignas(64) float out[32][PANEL];
    for (int64_t b = 0; b < blocks; b++) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t k = b * m.block; k < (b + 1) * m.block; k += 64, w += 64 * PANEL) {
            for (int i = 0; i < 32; i++) __builtin_prefetch(w + 4096 + i * 64);
            _tile_loadd(6, w, 128);
            _tile_loadd(7, w + 64, 128);
            _tile_loadd(4, x + k, K);
            _tile_dpbusd(0, 4, 6);
            _tile_dpbusd(1, 4, 7);
            if (two) {
                _tile_loadd(5, x + 16 * K + k, K);
                _tile_dpbusd(2, 5, 6);
                _tile_dpbusd(3, 5, 7);
            }
        }
        _tile_stored(0, sums[0], 64);
        _tile_stored(1, sums[1], 64);
        if (two) {
            _tile_stored(2, sums[0][16], 64);
            _tile_stored(3, sums[1][16], 64);
        }
        for (int64_t r = 0; r < count; r++)
            for (int i = 0; i < 2; i++) {
                float* to = out[r] + i * LANES;
                store(to, add_block(b ? load(to) : vec{}, *(const ivec*)sums[i][r],
                                    m.sums + b * padded + first + i * LANES, rows.scale[(t + r) * blocks + b]));
            }
    }
    for (int64_t r = 0; r < count; r++) {
        for (int i = 0; i < 2; i++)
            store(out[r] + i * LANES, load(out[r] + i * LANES) * load(m.scale + first + i * LANES));
        memcpy(y + (t + r) * m.n + first, out[r], width * sizeof(float));
    }
}
#endif

// y [T, N] = rows [T, K] times the matrix transposed. Called by all threads of a team.
static void product(const Matrix& m, int64_t tokens, const Rows& rows, float* y) {
    const int64_t panels = (m.n + PANEL - 1) / PANEL, blocks = (tokens + MOST_ROWS - 1) / MOST_ROWS;
#ifdef AMX
    if (m.kind == 2 && tokens > 1 && m.block % 64 == 0 && tiles_allowed()) {
        set_tiles(tokens < 32 ? tokens : 32);
#pragma omp for schedule(static) nowait
        for (int64_t number = 0; number < panels; number++)
            for (int64_t t = 0; t < tokens; t += 32) {
                const int64_t count = tokens - t < 32 ? tokens - t : 32;
                if (tokens > 32 && tokens % 32) set_tiles(count);
                tiles(m, number, t, count, rows, y);
            }
        _tile_release();
#pragma omp barrier
        return;
    }
#endif
#pragma omp for schedule(static)
    for (int64_t number = 0; number < panels; number++)
        for (int64_t b = 0; b < blocks; b++) {  // blocks of nearly the same size
            const int64_t t = tokens * b / blocks;
            switch (tokens * (b + 1) / blocks - t) {
                case 1: panel<1>(m, number, t, rows, y); break;
                case 2: panel<2>(m, number, t, rows, y); break;
                case 3: panel<3>(m, number, t, rows, y); break;
                case 4: panel<4>(m, number, t, rows, y); break;
                case 5: panel<5>(m, number, t, rows, y); break;
                case 6: panel<6>(m, number, t, rows, y); break;
                case 7: panel<7>(m, number, t, rows, y); break;
                case 8: panel<8>(m, number, t, rows, y); break;
                case 9: panel<9>(m, number, t, rows, y); break;
                case 10: panel<10>(m, number, t, rows, y); break;
                case 11: panel<11>(m, number, t, rows, y); break;
                default: panel<12>(m, number, t, rows, y);
            }
        }
}

// Token t's inputs x [K] of a matrix, to its row of q [T, K] and scale [T, K/block].
static void quantize_token(const Matrix& m, int64_t t, const float* x, uint8_t* q, float* scale) {
    quantize_row(x, m.k, m.block, q + t * m.k, scale + t * (m.k / m.block));
}

// Inputs x [T, K] of a matrix, if it takes int8. Called by all threads of a team.
static void quantize_inputs(const Matrix& m, int64_t tokens, const float* x, uint8_t* q, float* scale) {
    if (m.kind != 2) return;
#pragma omp for schedule(static)
    for (int64_t t = 0; t < tokens; t++) quantize_token(m, t, x + t * m.k, q, scale);
}

// y = x / rms(x) * weight; x itself without a weight. x and y may be the same.
static inline void norm_row(const float* x, int64_t width, const float* weight, float eps, float* y) {
    vec squares = {};
    for (int64_t i = 0; i < width; i += LANES) squares = squares + load(x + i) * load(x + i);
    const float inverse = 1.0f / sqrtf(sum_lanes(squares) / width + eps);
    for (int64_t i = 0; i < width; i += LANES)
        store(y + i, weight ? load(x + i) * inverse * load(weight + i) : load(x + i));
}

// x += delta (where given); y = x / rms(x) * weight (x itself without a weight), and as int8 where the next matrix is.
static void norm(const Pass& p, int64_t width, const float* delta, const float* weight, float eps, const Matrix* next,
                 float* copy) {
#pragma omp for schedule(static)
    for (int64_t t = 0; t < p.tokens; t++) {
        float *a = p.x + t * width, *b = p.y + t * width;
        if (delta)
            for (int64_t i = 0; i < width; i += LANES) store(a + i, load(a + i) + load(delta + t * width + i));
        if (copy) memcpy(copy + t * width, a, width * sizeof(float));
        norm_row(a, width, weight, eps, b);
        if (next && next->kind == 2) quantize_token(*next, t, b, p.q, p.q_scale);
    }
}

// y = act(gate) * up, of wide [T, 2 F], the gate first.
static void gate(const Pass& p, int64_t width, int64_t activation, const Matrix& next) {
#pragma omp for schedule(static)
    for (int64_t t = 0; t < p.tokens; t++) {
        const float *g = p.wide + t * 2 * width, *u = g + width;
        float* b = p.y + t * width;
        for (int64_t i = 0; i < width; i += LANES) {
            vec a = load(g + i);
            vec s = activation ? a * (0.79788456080286536f * 2) * (1.0f + 0.044715f * a * a) : a;
            store(b + i, a / (1.0f + vexp(-s)) * load(u + i));
        }
        if (next.kind == 2) quantize_token(next, t, b, p.q, p.q_scale);
    }
}

static void norm_head(float* x, int64_t dim, const float* weight, float eps) {
    vec squares = {};
    for (int64_t i = 0; i < dim; i += LANES) squares = squares + load(x + i) * load(x + i);
    const float inverse = 1.0f / sqrtf(sum_lanes(squares) / dim + eps);
    for (int64_t i = 0; i < dim; i += LANES) store(x + i, load(x + i) * inverse * load(weight + i));
}

// Head h of all tokens, in place in p.wide; keys and values also to the caches. One head after the other: keys of
// neighbouring slots share lines of the processor's caches.
static void rotate_and_store(const Stack& s, const Layer& layer, const Pass& p, int64_t h, float* keys, float* values) {
    const int64_t D = s.dim, half = D / 2, width = (s.heads + 2 * s.kv) * D;
    const float* weight = h < s.heads ? layer.q_norm : layer.k_norm;
    for (int64_t t = 0; t < p.tokens; t++) {
        float* head = p.wide + t * width + h * D;
        const int64_t slot = p.slot[t], base = (int64_t)p.row[t] * s.kv;
        if (layer.bias)
            for (int64_t i = 0; i < D; i += LANES) store(head + i, load(head + i) + load(layer.bias + h * D + i));
        if (h >= s.heads + s.kv) {
            memcpy(values + ((base + h - s.heads - s.kv) * p.length + slot) * D, head, D * sizeof(float));
            continue;
        }
        if (weight) norm_head(head, D, weight, s.eps);
        const float *cosine = p.cos + p.position[t] * half, *sine = p.sin + p.position[t] * half;
        for (int64_t i = 0; i < half; i++) {
            const float a = head[i], b = head[i + half];
            head[i] = a * cosine[i] - b * sine[i];
            head[i + half] = b * cosine[i] + a * sine[i];
        }
        if (h >= s.heads) {
            float* to = keys + (base + h - s.heads) * p.length * D + slot / LANES * LANES * D + slot % LANES;
            for (int64_t i = 0; i < D; i++) to[i * LANES] = head[i];
        }
    }
}

static float* scratch(int64_t size) {
    static thread_local float* buffer = nullptr;
    static thread_local int64_t room = 0;
    if (size > room) {
        free(buffer);
        room = size * 2;
        buffer = (float*)malloc(room * sizeof(float));
    }
    return buffer;
}

// G heads of one token that share keys and values: q and y [G, D].
template <int D, int G>
static void attend(const Pass& p, int64_t t, float softmax_scale, const float* q, const float* keys,
                   const float* values, float* y) {
    const int64_t first = p.prefix[t], extra = p.path[t + 1] - p.path[t], total = first + extra;
    const int32_t* seen = p.seen + p.path[t];
    const int64_t slots = extra ? seen[extra - 1] + 1 : first;
    const int64_t stride = (slots + BLOCK - 1) / BLOCK * BLOCK;
    float* scores = scratch(stride * G);
    for (int64_t base = 0; base < slots; base += BLOCK) {
        const float* k = keys + base * D;
        vec sum[G][4] = {};
        for (int d = 0; d < D; d++) {
            const vec k0 = load(k + d * LANES), k1 = load(k + (D + d) * LANES);
            const vec k2 = load(k + (2 * D + d) * LANES), k3 = load(k + (3 * D + d) * LANES);
            for (int g = 0; g < G; g++) {
                const float x = q[g * D + d];
                sum[g][0] = sum[g][0] + k0 * x;
                sum[g][1] = sum[g][1] + k1 * x;
                sum[g][2] = sum[g][2] + k2 * x;
                sum[g][3] = sum[g][3] + k3 * x;
            }
        }
        for (int g = 0; g < G; g++)
            for (int i = 0; i < 4; i++) store(scores + g * stride + base + i * LANES, sum[g][i]);
    }
    const int64_t padded = (total + LANES - 1) / LANES * LANES;
    float inverse[G];
    for (int g = 0; g < G; g++) {
        float* s = scores + g * stride;
        for (int64_t e = 0; e < extra; e++) s[first + e] = s[seen[e]];  // ascending: never overwrites one still to come
        vec top = splat(-INFINITY);
        for (int64_t j = total; j < padded; j++) s[j] = -INFINITY;
        for (int64_t j = 0; j < padded; j += LANES) top = vmax(top, load(s + j));
        const float most = max_lanes(top);
        vec sum = {};
        for (int64_t j = 0; j < padded; j += LANES) {
            vec w = vexp((load(s + j) - most) * softmax_scale);
            if (j + LANES > total)
                for (int64_t i = total - j; i < LANES; i++) w[i] = 0.0f;
            store(s + j, w);
            sum = sum + w;
        }
        inverse[g] = 1.0f / sum_lanes(sum);
    }
    vec mix[G][D / LANES] = {};
    for (int64_t j = 0; j < total; j++) {
        const float* v = values + (j < first ? j : seen[j - first]) * D;
        for (int g = 0; g < G; g++) {
            const float w = scores[g * stride + j];
            for (int i = 0; i < D / LANES; i++) mix[g][i] = mix[g][i] + load(v + i * LANES) * w;
        }
    }
    for (int g = 0; g < G; g++)
        for (int i = 0; i < D / LANES; i++) store(y + g * D + i * LANES, mix[g][i] * inverse[g]);
}

template <int D>
static void attend_heads(const Pass& p, int64_t t, int count, float scale, const float* q, const float* keys,
                         const float* values, float* y) {
    switch (count) {
        case 4: return attend<D, 4>(p, t, scale, q, keys, values, y);
        case 3: return attend<D, 3>(p, t, scale, q, keys, values, y);
        case 2: return attend<D, 2>(p, t, scale, q, keys, values, y);
        default: return attend<D, 1>(p, t, scale, q, keys, values, y);
    }
}

// p.wide [T, (heads + 2 kv) D] to p.y [T, heads D], and as int8 where the next matrix is.
static void attention(const Stack& s, const Layer& layer, const Pass& p, float* keys, float* values) {
    const int64_t D = s.dim, group = s.heads / s.kv, width = (s.heads + 2 * s.kv) * D;
    // Heads that share keys go together, but not where that would leave threads idle.
    const int64_t most = p.tokens * s.kv < 4 * p.threads ? 1 : 4;
    const int64_t parts = (group + most - 1) / most, tasks = p.tokens * s.kv * parts;
#pragma omp for schedule(static)
    for (int64_t h = 0; h < s.heads + 2 * s.kv; h++) rotate_and_store(s, layer, p, h, keys, values);
#pragma omp for schedule(dynamic, 1)
    for (int64_t task = 0; task < tasks; task++) {
        // All tokens with one head's keys before the next head's: those stay in the processor's caches.
        const int64_t g = task / (p.tokens * parts), t = task / parts % p.tokens, from = task % parts * most;
        const int64_t offset = ((int64_t)p.row[t] * s.kv + g) * p.length * D, h = g * group + from;
        const int count = (int)(group - from < most ? group - from : most);
        const float *k = keys + offset, *v = values + offset, *q = p.wide + t * width + h * D;
        float* y = p.y + (t * s.heads + h) * D;
        switch (D) {
            case 32: attend_heads<32>(p, t, count, s.softmax_scale, q, k, v, y); break;
            case 64: attend_heads<64>(p, t, count, s.softmax_scale, q, k, v, y); break;
            case 96: attend_heads<96>(p, t, count, s.softmax_scale, q, k, v, y); break;
            case 128: attend_heads<128>(p, t, count, s.softmax_scale, q, k, v, y); break;
            default: attend_heads<256>(p, t, count, s.softmax_scale, q, k, v, y);
        }
    }
    quantize_inputs(layer.out, p.tokens, p.y, p.q, p.q_scale);
}

// All layers: p.x [T, H] becomes the residual stream behind the last one. Called by all threads of a team. `projected`:
// p.wide has the first layer's queries, keys and values already.
static void run_layers(const Stack& s, const Pass& p, bool projected) {
    const Rows rows = {p.y, p.q, p.q_scale};
    for (int64_t n = 0; n < s.layers; n++) {
        const Layer& layer = s.layer[n];
        if (n || !projected) {
            norm(p, s.hidden, n ? p.delta : nullptr, layer.input_norm, s.eps, &layer.qkv,
                 p.streams ? p.streams[n] : nullptr);
            product(layer.qkv, p.tokens, rows, p.wide);
        }
        attention(s, layer, p, p.keys + n * p.layer_stride, p.values + n * p.layer_stride);
        product(layer.out, p.tokens, rows, p.delta);
        norm(p, s.hidden, p.delta, layer.mlp_norm, s.eps, &layer.gate_up, nullptr);
        product(layer.gate_up, p.tokens, rows, p.wide);
        gate(p, s.inner, s.activation, layer.down);
        product(layer.down, p.tokens, rows, p.delta);
    }
#pragma omp for schedule(static)
    for (int64_t i = 0; i < p.tokens * s.hidden; i++) p.x[i] += p.delta[i];
}

extern "C" {

// See run_layers.
void ek_stack(const Stack* stack, const Pass* pass) {
#pragma omp parallel num_threads(pass->threads)
    run_layers(*stack, *pass, false);
}

// A draft head reads pairs: inputs [T, E + H], embeddings and features, which it overwrites. p.x becomes what it
// predicts; then, for the last `count` tokens, logits [count, N], where count may be 0. inputs_q and inputs_scale:
// scratch [T, E + H], [T, (E + H) / block].
void ek_draft(const Head* head, const Pass* pass, float* inputs, uint8_t* inputs_q, float* inputs_scale, int64_t count,
              float* logits) {
    const Pass& p = *pass;
    const int64_t H = head->stack.hidden, E = head->embedding, K = E + H;
    const bool eagle3 = head->fc.n == 0;
    const Matrix& first = eagle3 ? head->stack.layer[0].qkv : head->fc;
#pragma omp parallel num_threads(p.threads)
    {
#pragma omp for schedule(static)
        for (int64_t t = 0; t < p.tokens; t++) {
            float* x = inputs + t * K;
            if (eagle3) memcpy(p.x + t * H, x + E, H * sizeof(float));
            if (head->embed_norm) norm_row(x, E, head->embed_norm, head->stack.eps, x);
            if (head->feature_norm) norm_row(x + E, H, head->feature_norm, head->stack.eps, x + E);
            if (first.kind == 2) quantize_token(first, t, x, inputs_q, inputs_scale);
        }
        product(first, p.tokens, {inputs, inputs_q, inputs_scale}, eagle3 ? p.wide : p.x);
        if (head->bias) {
#pragma omp for schedule(static)
            for (int64_t t = 0; t < p.tokens; t++)
                for (int64_t i = 0; i < H; i++) p.x[t * H + i] += head->bias[i];
        }
        run_layers(head->stack, p, eagle3);
        if (count) {
            const float* last = p.x + (p.tokens - count) * H;
            if (head->output_norm) {
#pragma omp for schedule(static)
                for (int64_t t = 0; t < count; t++)
                    norm_row(last + t * H, H, head->output_norm, head->stack.eps, p.y + t * H);
                last = p.y;
            }
            quantize_inputs(head->readout, count, last, p.q, p.q_scale);
            product(head->readout, count, {last, p.q, p.q_scale}, logits);
        }
    }
}

// y [T, N] = x [T, K] times the matrix transposed; q and q_scale: scratch [T, K], [T, K/block].
void ek_product(const Matrix* matrix, int64_t tokens, const float* x, uint8_t* q, float* q_scale, float* y,
                int64_t threads) {
    const Rows rows = {x, q, q_scale};
#pragma omp parallel num_threads(threads)
    {
        quantize_inputs(*matrix, tokens, x, q, q_scale);
        product(*matrix, tokens, rows, y);
    }
}

// y = x / rms(x) * weight; [T, width].
void ek_norm(int64_t tokens, int64_t width, float* x, const float* weight, float eps, float* y) {
    Pass p = {};
    p.tokens = tokens, p.x = x, p.y = y;
    norm(p, width, nullptr, weight, eps, nullptr, nullptr);
}

// In all layers' caches of one row, copy the slots `from` to the slots to, to+1, ...; from[i] >= to + i.
void ek_move(int64_t layers, int64_t layer_stride, int64_t kv, int64_t dim, int64_t length, int64_t row, int64_t count,
             const int32_t* from, int64_t to, float* keys, float* values) {
    for (int64_t n = 0; n < layers * kv; n++) {
        const int64_t base = n / kv * layer_stride + (row * kv + n % kv) * length * dim;
        for (int64_t i = 0; i < count; i++) {
            const int64_t a = from[i], b = to + i;
            if (a == b) continue;
            memcpy(values + base + b * dim, values + base + a * dim, dim * sizeof(float));
            float *x = keys + base + a / LANES * LANES * dim + a % LANES;
            float* y = keys + base + b / LANES * LANES * dim + b % LANES;
            for (int64_t d = 0; d < dim; d++) y[d * LANES] = x[d * LANES];
        }
    }
}

// The k largest of each row of x [T, N], largest first, the first of equal ones first: [T, k]. k is at most 64.
void ek_top(int64_t tokens, int64_t width, int64_t k, const float* x, int64_t* found) {
    for (int64_t t = 0; t < tokens; t++) {
        const float* row = x + t * width;
        float best[64];
        int64_t* at = found + t * k;
        int64_t have = 0;
        float least = -INFINITY;  // of the best, once there are k
        for (int64_t i = 0; i < width; i += LANES) {
            if (have == k && i + LANES <= width && !any(load(row + i) > least)) continue;
            for (int64_t j = i; j < i + LANES && j < width; j++) {
                const float v = row[j];
                if (have == k && !(v > least)) continue;
                int64_t place = have < k ? have++ : k - 1;
                for (; place > 0 && best[place - 1] < v; place--) best[place] = best[place - 1], at[place] = at[place - 1];
                best[place] = v, at[place] = j;
                least = best[have - 1];
            }
        }
    }
}

// The nodes of one level of a tree that have children, n of them; see ek_grow.
struct Level {
    int64_t count, depth, offset;  // offset: nodes of this kind in the levels above, the root not counted
    const int32_t* node;           // [n] numbers in the tree
    const int32_t* above;          // [n] places of their parents among the level above's n
    const int32_t* path;           // [n+1] what each attends to behind the committed entries:
    const int32_t* seen;           // seen[path[i]] .. seen[path[i+1]-1]
    const int32_t* first;          // [n+1] their children: child[first[i]] .. child[first[i+1]-1], best first
    const int32_t* child;
};

// A greedy draft over a fixed tree: each node's children are the best tokens behind it.
//   table        embeddings [V, E], float32, or float16 where `half`
//   length       committed entries of the row pass->row[0]; pass: arrays for the widest level, seen for the longest list
//   vocab        token of each logit, or NULL: logits are over all tokens
//   logits       scratch [n, N] for the widest level; on entry the first row holds the logits behind the root
//   pass->x      [n, H] scratch; on entry the first row holds the feature predicted behind the root
//   tokens       [nodes], the root's given, the others filled in
void ek_grow(const Head* head, Pass* pass, const void* table, int64_t half, int64_t length, int64_t levels,
             const Level* level, const int64_t* vocab, float* inputs, uint8_t* inputs_q, float* inputs_scale, float* logits, int64_t* tokens) {
    const int64_t H = head->stack.hidden, E = head->embedding, N = head->readout.n;
    int32_t *slot = (int32_t*)pass->slot, *position = (int32_t*)pass->position, *prefix = (int32_t*)pass->prefix;
    int32_t* seen = (int32_t*)pass->seen;
    for (int64_t l = 0; l < levels; l++) {
        const Level& now = level[l];
        if (l) {
            for (int64_t i = 0; i < now.count; i++) {
                float* to = inputs + i * (E + H);
                const int64_t token = tokens[now.node[i]];
                if (half)
                    for (int64_t j = 0; j < E; j += LANES) store(to + j, widen((const uint16_t*)table + token * E + j));
                else
                    memcpy(to, (const float*)table + token * E, E * sizeof(float));
                memcpy(to + E, pass->x + now.above[i] * H, H * sizeof(float));
                slot[i] = (int32_t)(length + now.offset + i);
                position[i] = (int32_t)(length + now.depth - 1);
                prefix[i] = (int32_t)length;
            }
            for (int64_t i = 0; i < now.path[now.count]; i++) seen[i] = (int32_t)length + now.seen[i];
            pass->tokens = now.count;
            pass->path = now.path;
            ek_draft(head, pass, inputs, inputs_q, inputs_scale, now.count, logits);
        }
        for (int64_t i = 0; i < now.count; i++) {
            int64_t best[64];
            const int64_t k = now.first[i + 1] - now.first[i];
            ek_top(1, N, k, logits + i * N, best);
            for (int64_t j = 0; j < k; j++)
                tokens[now.child[now.first[i] + j]] = vocab ? vocab[best[j]] : best[j];
        }
    }
}
}
