/* A digest of blocks of memory at its bandwidth. See checksum.py for the formula and what it sees. */

#include <stdint.h>

enum { SECTOR_WORDS = 64 };

static uint64_t digest(const uint64_t *words, int64_t sectors, uint64_t factor) {
    uint64_t value = 0;
    for (int64_t sector = 0; sector < sectors; sector++, words += SECTOR_WORDS) {
        uint64_t sum = 0;
        for (int i = 0; i < SECTOR_WORDS; i++) sum += words[i];
        value = value * factor + sum;
    }
    return value;
}

/* Digests of consecutive blocks, the last of which may be shorter. */
void zero_fn_digests(const uint64_t *words, int64_t nbytes, int64_t block_nbytes, uint64_t factor, uint64_t *digests) {
    const int64_t sector_nbytes = SECTOR_WORDS * (int64_t)sizeof *words;
    for (int64_t done = 0; done < nbytes; done += block_nbytes) {
        const int64_t left = nbytes - done < block_nbytes ? nbytes - done : block_nbytes;
        *digests++ = digest(words + done / (int64_t)sizeof *words, left / sector_nbytes, factor);
    }
}
