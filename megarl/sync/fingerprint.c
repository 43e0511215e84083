// Weighted sums of the bit patterns of matrices, modulo 2^64, and their largest magnitudes: the inner loops of fingerprint.py on a CPU.

#include <stddef.h>
#include <stdint.h>

#define STRETCH 8192  // columns whose keys stay in the cache while all rows are read

// MAGNITUDE: the bits without the sign; a pattern that is less than NORMAL there counts as 0.
#define SUMS(NAME, PATTERN, MAGNITUDE, NORMAL)                                                                              \
    void NAME(const PATTERN *bits, size_t count, size_t rows, size_t columns, size_t matrix_step, size_t row_step,          \
              const uint64_t *row_keys, const uint64_t *column_keys, uint64_t *sums, int32_t *largest) {                    \
        for (size_t start = 0; start < columns; start += STRETCH) {                                                         \
            size_t width = columns - start < STRETCH ? columns - start : STRETCH;                                           \
            const uint64_t *keys = column_keys + start;                                                                     \
            for (size_t matrix = 0; matrix < count; matrix++)                                                               \
                for (size_t row = 0; row < rows; row++) {                                                                   \
                    const PATTERN *place = bits + matrix * matrix_step + row * row_step + start;                            \
                    uint64_t sum = 0;                                                                                       \
                    PATTERN most = 0;                                                                                       \
                    for (size_t column = 0; column < width; column++) {                                                     \
                        PATTERN pattern = place[column];                                                                    \
                        PATTERN magnitude = pattern & MAGNITUDE;                                                            \
                        most = magnitude > most ? magnitude : most;                                                         \
                        sum += (uint64_t)(int64_t)(magnitude < NORMAL ? 0 : pattern) * keys[column];                        \
                    }                                                                                                       \
                    sums[matrix] += sum * row_keys[row];                                                                    \
                    largest[matrix] = most > largest[matrix] ? most : largest[matrix];                                      \
                }                                                                                                           \
        }                                                                                                                   \
    }

SUMS(sums_float32, int32_t, 0x7FFFFFFF, 0x00800000)
SUMS(sums_bfloat16, int16_t, 0x7FFF, 0x0080)
SUMS(sums_float16, int16_t, 0x7FFF, 0x0400)
SUMS(sums_float8_e4m3fn, int8_t, 0x7F, 0)
