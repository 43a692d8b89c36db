/* Checksum tables, and copies that take or check them on the way, without the interpreter's lock.

   Computes what `kvstore.model.checksum` defines: XXH3-64 (seed 0, default secret) per (layer, KV head) over that
   head's pages in page order. Public specification: xxHash 0.8, "XXH3 algorithm overview", the path of inputs above
   240 bytes; shorter ones and head pages that are no multiple of 64 bytes stay in Python.

   `gather` reads each byte once: where the CPU has the vectors, it is hashed from the register that is stored, else from
   the slot. `scatter` hashes a layer and copies it
   only then, while it is still in the core's own cache. Both store past the caches, since a slot is read next by
   somebody else and pages by other cores; that saves reading the lines that are overwritten. */

#if !defined(Py_GIL_DISABLED)
#define Py_LIMITED_API 0x030B0000
#endif
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__ || !defined(__SIZEOF_INT128__)
#error "written for 64-bit little-endian machines; elsewhere the package does without this file"
#endif

typedef unsigned char byte;

enum {
    STRIPE = 64,                 /* bytes that go into the state at a time */
    SECRET = 192,                /* bytes of the default secret */
    BLOCK = (SECRET - STRIPE) / 8, /* stripes between two scrambles of the state */
    LEAST = 241,                 /* shorter inputs are hashed otherwise */
    AHEAD = 512                  /* bytes that are fetched in advance */
};

#define PRIME32_1 0x9E3779B1u
#define PRIME32_2 0x85EBCA77u
#define PRIME32_3 0xC2B2AE3Du
#define PRIME64_1 0x9E3779B185EBCA87u
#define PRIME64_2 0xC2B2AE3D27D4EB4Fu
#define PRIME64_3 0x165667B19E3779F9u
#define PRIME64_4 0x85EBCA77C2B2AE63u
#define PRIME64_5 0x27D4EB2F165667C5u
#define PRIME_AVALANCHE 0x165667919E3779F9u

/* clang-format off */
static const byte SECRET_BYTES[SECRET] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};
/* clang-format on */

/* Where the bytes of a chunk's piece come from: rows anywhere in `memory`, in the order of the stored piece. Without
   `places` the rows follow each other. */
typedef struct {
    const byte *memory;
    const int64_t *places;
    size_t row_bytes;
} Rows;

/* The piece itself: head pages as stored, [layer][page][head][size bytes]. */
typedef struct {
    size_t layers, pages, heads, size;
} Shape;

static inline uint64_t load(const byte *at)
{
    uint64_t word;
    memcpy(&word, at, sizeof word);
    return word;
}

static inline uint64_t fold(uint64_t a, uint64_t b)
{
    __extension__ const unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static inline void add_stripe(uint64_t state[8], const byte *in, const byte *key)
{
    for (int lane = 0; lane < 8; lane++) {
        const uint64_t word = load(in + 8 * lane), mixed = word ^ load(key + 8 * lane);
        state[lane ^ 1] += word;
        state[lane] += (mixed & 0xFFFFFFFFu) * (mixed >> 32);
    }
}

/* Adds stripes [at, at + count) of an input whose last scramble comes before stripe `scrambled`; copies them to `out`
   unless it is NULL. */
typedef void AddStripes(uint64_t state[8], byte *out, const byte *in, size_t count, size_t at, size_t scrambled);

static void add_stripes_anywhere(uint64_t state[8], byte *out, const byte *in, size_t count, size_t at,
                                 size_t scrambled)
{
    for (const size_t stop = at + count; at < stop; at++, in += STRIPE) {
        if (out != NULL)
            memcpy(out, in, STRIPE);
        add_stripe(state, out != NULL ? out : in, SECRET_BYTES + 8 * (at % BLOCK));
        out = out != NULL ? out + STRIPE : NULL;
        if (at % BLOCK == BLOCK - 1 && at < scrambled)
            for (int lane = 0; lane < 8; lane++) {
                const uint64_t key = load(SECRET_BYTES + SECRET - STRIPE + 8 * lane);
                state[lane] = (state[lane] ^ (state[lane] >> 47) ^ key) * PRIME32_1;
            }
    }
}

#if defined(__x86_64__)
#define AVX2 __attribute__((target("avx2")))

AVX2 static inline __m256i added(__m256i state, __m256i in, __m256i key)
{
    const __m256i mixed = _mm256_xor_si256(in, key);
    const __m256i product = _mm256_mul_epu32(mixed, _mm256_srli_epi64(mixed, 32));
    return _mm256_add_epi64(state, _mm256_add_epi64(product, _mm256_shuffle_epi32(in, _MM_SHUFFLE(1, 0, 3, 2))));
}

AVX2 static inline __m256i scrambled_half(__m256i state, __m256i key)
{
    const __m256i prime = _mm256_set1_epi32((int)PRIME32_1);
    const __m256i mixed = _mm256_xor_si256(_mm256_xor_si256(state, _mm256_srli_epi64(state, 47)), key);
    const __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(mixed, 32), prime);
    return _mm256_add_epi64(_mm256_mul_epu32(mixed, prime), _mm256_slli_epi64(high, 32));
}

AVX2 static void add_stripes_avx2(uint64_t state[8], byte *out, const byte *in, size_t count, size_t at,
                                  size_t scrambled)
{
    const __m256i *const last = (const __m256i *)(SECRET_BYTES + SECRET - STRIPE);
    const int past_caches = (uintptr_t)out % sizeof(__m256i) == 0;
    __m256i low = _mm256_loadu_si256((__m256i *)state), high = _mm256_loadu_si256((__m256i *)(state + 4));
    for (const size_t stop = at + count; at < stop; at++, in += STRIPE) {
        const __m256i *const key = (const __m256i *)(SECRET_BYTES + 8 * (at % BLOCK));
        const __m256i first = _mm256_loadu_si256((const __m256i *)in);
        const __m256i second = _mm256_loadu_si256((const __m256i *)(in + 32));
        _mm_prefetch((const char *)in + AHEAD, _MM_HINT_T0);
        if (out != NULL) {
            if (past_caches) {
                _mm256_stream_si256((__m256i *)out, first);
                _mm256_stream_si256((__m256i *)(out + 32), second);
            } else {
                _mm256_storeu_si256((__m256i *)out, first);
                _mm256_storeu_si256((__m256i *)(out + 32), second);
            }
            out += STRIPE;
        }
        low = added(low, first, _mm256_loadu_si256(key));
        high = added(high, second, _mm256_loadu_si256(key + 1));
        if (at % BLOCK == BLOCK - 1 && at < scrambled) {
            low = scrambled_half(low, _mm256_loadu_si256(last));
            high = scrambled_half(high, _mm256_loadu_si256(last + 1));
        }
    }
    _mm256_storeu_si256((__m256i *)state, low);
    _mm256_storeu_si256((__m256i *)(state + 4), high);
}

AVX2 static void copy_avx2(byte *out, const byte *in, size_t bytes)
{
    if ((uintptr_t)out % sizeof(__m256i) != 0) {
        memcpy(out, in, bytes);
        return;
    }
    for (const byte *const stop = in + bytes; in < stop; in += STRIPE, out += STRIPE) {
        const __m256i first = _mm256_loadu_si256((const __m256i *)in);
        const __m256i second = _mm256_loadu_si256((const __m256i *)(in + 32));
        _mm256_stream_si256((__m256i *)out, first);
        _mm256_stream_si256((__m256i *)(out + 32), second);
    }
}

#define STORES_ENDED() _mm_sfence()
#else
#define STORES_ENDED() ((void)0)
#endif

/* Copies whole stripes. */
static void copy_anywhere(byte *out, const byte *in, size_t bytes) { memcpy(out, in, bytes); }

static AddStripes *add_stripes = add_stripes_anywhere;
static void (*copy)(byte *out, const byte *in, size_t bytes) = copy_anywhere;

/* Whether the vector code is used from now on. */
static int choose(int vectors)
{
    add_stripes = add_stripes_anywhere;
    copy = copy_anywhere;
#if defined(__x86_64__)
    if (vectors && __builtin_cpu_supports("avx2")) {
        add_stripes = add_stripes_avx2;
        copy = copy_avx2;
        return 1;
    }
#endif
    (void)vectors;
    return 0;
}

/* Digest of one head's pages, the first of which begins `offset` bytes into the piece. Copied into `slot` unless NULL. */
static uint64_t digest(const Rows *rows, byte *slot, size_t offset, const Shape *shape)
{
    const size_t length = shape->pages * shape->size, last = length / STRIPE - 1;
    const size_t scrambled = (length - 1) / (STRIPE * BLOCK) * BLOCK;
    uint64_t state[8] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};
    uint64_t sum = length * PRIME64_1;

    for (size_t page = 0, at = 0; page < shape->pages; page++, offset += (shape->heads - 1) * shape->size)
        for (size_t left = shape->size, bytes; left; left -= bytes, offset += bytes) {
            const size_t row = offset / rows->row_bytes, inside = offset % rows->row_bytes;
            const byte *in = rows->memory + (rows->places ? (size_t)rows->places[row] : row) * rows->row_bytes + inside;
            byte *out = slot ? slot + offset : NULL;
            size_t count;
            bytes = left < rows->row_bytes - inside ? left : rows->row_bytes - inside;
            count = bytes / STRIPE;
            if (at + count > last) { /* the last stripe has a key of its own */
                add_stripes(state, out, in, --count, at, scrambled);
                in += STRIPE * count;
                if (out != NULL)
                    in = memcpy(out + STRIPE * count, in, STRIPE);
                add_stripe(state, in, SECRET_BYTES + SECRET - STRIPE - 7);
            } else
                add_stripes(state, out, in, count, at, scrambled);
            at += count;
        }
    for (int lane = 0; lane < 8; lane += 2) {
        const byte *key = SECRET_BYTES + 11 + 8 * lane;
        sum += fold(state[lane] ^ load(key), state[lane + 1] ^ load(key + 8));
    }
    sum = (sum ^ (sum >> 37)) * PRIME_AVALANCHE;
    return sum ^ (sum >> 32);
}

static void digests(const Rows *rows, byte *slot, const Shape *shape, uint64_t *table)
{
    const size_t layer_bytes = shape->pages * shape->heads * shape->size;
    for (size_t layer = 0; layer < shape->layers; layer++)
        for (size_t head = 0; head < shape->heads; head++)
            *table++ = digest(rows, slot, layer * layer_bytes + head * shape->size, shape);
    if (slot != NULL)
        STORES_ENDED();
}

/* Copies the layers of `piece` to `places` as long as they have the checksums of `table`: how many those are. */
static size_t copied_layers(const byte *piece, const Shape *shape, const uint64_t *table, byte *memory,
                            const int64_t *places, size_t row_bytes)
{
    const size_t layer_bytes = shape->pages * shape->heads * shape->size;
    size_t layer = 0;
    for (; layer < shape->layers; layer++, piece += layer_bytes) {
        const Rows rows = {piece, NULL, layer_bytes};
        for (size_t head = 0; head < shape->heads; head++)
            if (digest(&rows, NULL, head * shape->size, shape) != *table++)
                goto ended;
        for (size_t done = 0; done < layer_bytes; done += row_bytes)
            copy(memory + (size_t)*places++ * row_bytes, piece + done, row_bytes);
    }
ended:
    STORES_ENDED();
    return layer;
}

/* 0 and a ValueError unless a piece of `bytes` has this shape, hashes here, and `table` has a place for each digest. */
static int fits(const Shape *shape, Py_ssize_t bytes, const Py_buffer *table)
{
    size_t product = shape->size;
    const int overflows = __builtin_mul_overflow(product, shape->pages, &product) || product < LEAST ||
                          __builtin_mul_overflow(product, shape->heads, &product) ||
                          __builtin_mul_overflow(product, shape->layers, &product) || product != (size_t)bytes;
    if (overflows || !bytes || shape->size % STRIPE || shape->layers * shape->heads * 8 != (size_t)table->len ||
        (uintptr_t)table->buf % 8) {
        PyErr_SetString(PyExc_ValueError, "the shape does not fit the piece and the table, or is not hashed here");
        return 0;
    }
    return 1;
}

/* 0 and an error unless `places` names rows of `memory` that are as much as `bytes`, and each layer is whole rows. */
static int rows_fit(const Py_buffer *memory, Py_ssize_t row_bytes, const Py_buffer *places, const Shape *shape,
                    Py_ssize_t bytes)
{
    const int64_t *place = places->buf;
    const Py_ssize_t count = places->len / 8;
    if (row_bytes <= 0 || row_bytes % STRIPE || bytes % row_bytes || bytes / row_bytes != count || places->len % 8 ||
        bytes / (Py_ssize_t)shape->layers % row_bytes || (uintptr_t)place % 8) {
        PyErr_SetString(PyExc_ValueError, "the rows are not the layers of the piece");
        return 0;
    }
    for (Py_ssize_t row = 0; row < count; row++)
        if (place[row] < 0 || place[row] >= memory->len / row_bytes) {
            PyErr_Format(PyExc_IndexError, "row %lld of %zd", (long long)place[row], memory->len / row_bytes);
            return 0;
        }
    return 1;
}

PyDoc_STRVAR(table_doc, "table(stored, layers, pages, heads, head_page_bytes, table)\n\n"
                        "Fill `table` (u64, layers x heads) with the checksums of `stored`.");

static PyObject *table_of(PyObject *module, PyObject *arguments)
{
    Py_buffer stored, table;
    Py_ssize_t layers, pages, heads, size;
    int done;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "y*nnnnw*:table", &stored, &layers, &pages, &heads, &size, &table))
        return NULL;
    const Shape shape = {(size_t)layers, (size_t)pages, (size_t)heads, (size_t)size};
    done = fits(&shape, stored.len, &table);
    if (done) {
        const Rows rows = {stored.buf, NULL, (size_t)stored.len};
        Py_BEGIN_ALLOW_THREADS
        digests(&rows, NULL, &shape, table.buf);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&stored);
    PyBuffer_Release(&table);
    if (!done)
        return NULL;
    Py_RETURN_NONE;
}

PyDoc_STRVAR(gather_doc, "gather(memory, row_bytes, places, slot, layers, pages, heads, head_page_bytes, table)\n\n"
                         "Fill `slot` with the rows of `memory` at `places` (i64), and `table` with the checksums.");

static PyObject *gather(PyObject *module, PyObject *arguments)
{
    Py_buffer memory, places, slot, table;
    Py_ssize_t row_bytes, layers, pages, heads, size;
    int done;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "y*ny*w*nnnnw*:gather", &memory, &row_bytes, &places, &slot, &layers, &pages,
                          &heads, &size, &table))
        return NULL;
    const Shape shape = {(size_t)layers, (size_t)pages, (size_t)heads, (size_t)size};
    done = fits(&shape, slot.len, &table) && rows_fit(&memory, row_bytes, &places, &shape, slot.len);
    if (done) {
        const Rows rows = {memory.buf, places.buf, (size_t)row_bytes};
        Py_BEGIN_ALLOW_THREADS
        digests(&rows, slot.buf, &shape, table.buf);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&memory);
    PyBuffer_Release(&places);
    PyBuffer_Release(&slot);
    PyBuffer_Release(&table);
    if (!done)
        return NULL;
    Py_RETURN_NONE;
}

PyDoc_STRVAR(scatter_doc, "scatter(piece, layers, pages, heads, head_page_bytes, table, memory, row_bytes, places)\n\n"
                          "Copy the layers of `piece` to the rows of `memory` at `places` (i64) up to the first that\n"
                          "has not the checksums of `table`; returns how many were copied.");

static PyObject *scatter(PyObject *module, PyObject *arguments)
{
    Py_buffer piece, table, memory, places;
    Py_ssize_t row_bytes, layers, pages, heads, size;
    size_t copied = 0;
    int done;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "y*nnnny*w*ny*:scatter", &piece, &layers, &pages, &heads, &size, &table, &memory,
                          &row_bytes, &places))
        return NULL;
    const Shape shape = {(size_t)layers, (size_t)pages, (size_t)heads, (size_t)size};
    done = fits(&shape, piece.len, &table) && rows_fit(&memory, row_bytes, &places, &shape, piece.len);
    if (done) {
        Py_BEGIN_ALLOW_THREADS
        copied = copied_layers(piece.buf, &shape, table.buf, memory.buf, places.buf, (size_t)row_bytes);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&piece);
    PyBuffer_Release(&table);
    PyBuffer_Release(&memory);
    PyBuffer_Release(&places);
    return done ? PyLong_FromSize_t(copied) : NULL;
}

PyDoc_STRVAR(use_vectors_doc, "use_vectors(wanted)\n\n"
                              "Choose between the code for this CPU's vectors and the code for any CPU; returns whether\n"
                              "the first is used. For tests: nothing else may run here meanwhile.");

static PyObject *use_vectors(PyObject *module, PyObject *wanted)
{
    const int vectors = PyObject_IsTrue(wanted);
    (void)module;
    return vectors < 0 ? NULL : PyBool_FromLong(choose(vectors));
}

static PyMethodDef methods[] = {{"table", table_of, METH_VARARGS, table_doc},
                                {"gather", gather, METH_VARARGS, gather_doc},
                                {"scatter", scatter, METH_VARARGS, scatter_doc},
                                {"use_vectors", use_vectors, METH_O, use_vectors_doc},
                                {NULL, NULL, 0, NULL}};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_checksum", "See kvstore.model.checksum.", -1, methods,
                                        NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__checksum(void)
{
    choose(1);
    return PyModule_Create(&definition);
}
