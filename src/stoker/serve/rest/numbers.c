/* One dense list of JSON numbers, nested or not, read in one pass into doubles.
 *
 * What is read is what JSON says, and each number is the double that is nearest to it: up to 2^53 as
 * digits and a power of ten up to 22 it is one division or product of two exact doubles (Clinger
 * 1990). Up to 19 digits it is one of two exact numbers of 64 bits, where a long double has these:
 * what that rounds to is what the number rounds to, but where it is just between two doubles. The rest
 * is strtod's. Whatever is not plain ends it with 0, and others read the text.
 *
 * The text ends in a zero byte, as Python's do: no loop that stops at what is no digit, blank or
 * bracket leaves it.
 */
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define MAX_RANK 32
#define MAX_EXACT (1ULL << 53)
#define MAX_DIGITS 19 /* of a number that 64 bits hold in any case */

static const double POWERS[] = {1e0,  1e1,  1e2,  1e3,  1e4,  1e5,  1e6,  1e7,
                                1e8,  1e9,  1e10, 1e11, 1e12, 1e13, 1e14, 1e15,
                                1e16, 1e17, 1e18, 1e19, 1e20, 1e21, 1e22};

#if LDBL_MANT_DIG == 64
static const long double LONG_POWERS[] = {1e0L,  1e1L,  1e2L,  1e3L,  1e4L,  1e5L,  1e6L,
                                          1e7L,  1e8L,  1e9L,  1e10L, 1e11L, 1e12L, 1e13L,
                                          1e14L, 1e15L, 1e16L, 1e17L, 1e18L, 1e19L, 1e20L,
                                          1e21L, 1e22L, 1e23L, 1e24L, 1e25L, 1e26L, 1e27L};

/* Whether the double that is nearest to number x 10^power is known; power from -27 to 27. */
static int by_long_double(uint64_t number, int64_t power, double *out) {
  long double size = power < 0 ? (long double)number / LONG_POWERS[-power]
                               : (long double)number * LONG_POWERS[power];
  uint64_t bits;
  memcpy(&bits, &size, sizeof bits);
  *out = (double)size;
  return (bits & 0x7ff) != 0x400;
}
#else
static int by_long_double(uint64_t number, int64_t power, double *out) {
  (void)number, (void)power, (void)out;
  return 0;
}
#endif

static int is_digit(unsigned char byte) { return (unsigned char)(byte - '0') <= 9; }

static const unsigned char *after_blanks(const unsigned char *at) {
  while (*at == ' ' || *at == '\t' || *at == '\n' || *at == '\r') at++;
  return at;
}

/* Up to eight digits at once; the rest one by one. `number` goes on from what it is. */
static const unsigned char *digits(const unsigned char *at, const unsigned char *end,
                                   uint64_t *number) {
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
  static const uint64_t TENS[] = {1, 10, 100, 1000, 10000, 100000, 1000000, 10000000, 100000000};
  if (end - at >= 8) {
    uint64_t eight;
    memcpy(&eight, at, 8);
    uint64_t others =
        ((eight + 0x4646464646464646) | (eight - 0x3030303030303030)) & 0x8080808080808080;
    unsigned count = others ? (unsigned)__builtin_ctzll(others) / 8 : 8;
    if (count == 0) return at;
    eight = (eight & 0x0f0f0f0f0f0f0f0f) << (64 - 8 * count);
    eight = (eight * 2561) >> 8;
    eight = ((eight & 0x00ff00ff00ff00ff) * 6553601) >> 16;
    eight = ((eight & 0x0000ffff0000ffff) * 42949672960001) >> 32;
    *number = *number * TENS[count] + eight;
    at += count;
    if (count < 8) return at;
  }
#endif
  while (is_digit(*at)) *number = *number * 10 + (uint64_t)(*at++ - '0');
  return at;
}

/* Behind a number; 0 where it is none, or not read here. */
static const unsigned char *read_number(const unsigned char *at, const unsigned char *end,
                                        double *out, int *whole, size_t *slow) {
  const unsigned char *begin = at;
  int minus = *at == '-', is_whole = 1;
  at += minus;
  uint64_t number = 0;
  int64_t power = 0;
  const unsigned char *first = at;
  if (*at == '0') {
    if (is_digit(*++at)) return 0;
  } else {
    at = digits(at, end, &number);
    if (at == first) return 0;
  }
  size_t many = (size_t)(at - first);
  if (*at == '.') {
    first = ++at;
    at = digits(at, end, &number);
    if (at == first) return 0;
    many += (size_t)(at - first);
    power = first - at;
    is_whole = 0;
  }
  if (*at == 'e' || *at == 'E') {
    int down = *++at == '-';
    at += down || *at == '+';
    uint64_t exponent = 0;
    first = at;
    at = digits(at, end, &exponent);
    if (at == first || at - first > 4) return 0;
    power += down ? -(int64_t)exponent : (int64_t)exponent;
    is_whole = 0;
  }
  int exact = many <= MAX_DIGITS && number <= MAX_EXACT && power >= -22 && power <= 22;
  if (is_whole) {
    if (!exact) return 0;
    /* -0 is a whole number, and that has no sign. */
    *out = (double)(minus ? -(int64_t)number : (int64_t)number);
    return at;
  }
  *whole = 0;
  if (exact) {
    double size = power < 0 ? (double)number / POWERS[-power] : (double)number * POWERS[power];
    *out = minus ? -size : size;
    return at;
  }
  double size;
  if (many <= MAX_DIGITS && power >= -27 && power <= 27 && by_long_double(number, power, &size)) {
    *out = minus ? -size : size;
    return at;
  }
  ++*slow;
  char *stop;
  *out = strtod((const char *)begin, &stop);
  /* Where a locale writes numbers otherwise it stops before. What is beyond a double is refused by
   * others. */
  return stop == (const char *)at && isnormal(*out) ? at : 0;
}

/* Behind the list that begins at `begin`, in bytes of the text; 0 where it is not plain.
 *
 * text: `size` bytes and a zero. out: room for `room` numbers. shape: MAX_RANK sides, of which `rank`
 * are set. whole: whether all numbers are written as whole ones; none of these is beyond 2^53. */
size_t stoker_read_list(const char *text, size_t begin, size_t size, double *out, size_t room, int64_t *shape,
                        int32_t *rank, size_t *numbers, int32_t *whole) {
  const unsigned char *bytes = (const unsigned char *)text;
  const unsigned char *at = bytes + begin, *end = bytes + size;
  int64_t items[MAX_RANK];
  int level = 0, deepest = 0, all_whole = 1;
  size_t count = 0, slow = 0;
  if (*at != '[') return 0;
  for (;;) {
    at = after_blanks(at);
    if (*at == '[') {
      if (level == MAX_RANK || (deepest && level == deepest)) return 0;
      if (!deepest) shape[level] = -1;
      items[level++] = 0;
      at++;
      continue;
    }
    if (!deepest) deepest = level;
    if (level != deepest || count == room) return 0;
    at = read_number(at, end, out + count, &all_whole, &slow);
    if (!at) return 0;
    count++;
    /* A text of many such is read sooner by who has no need of strtod. */
    if (slow > 16 && slow > count / 64) return 0;
    for (;;) {
      items[level - 1]++;
      at = after_blanks(at);
      if (*at == ',') {
        at++;
        break;
      }
      if (*at != ']') return 0;
      at++;
      level--;
      if (shape[level] < 0)
        shape[level] = items[level];
      else if (shape[level] != items[level])
        return 0;
      if (level == 0) {
        *rank = deepest;
        *numbers = count;
        *whole = all_whole;
        return (size_t)(at - bytes);
      }
    }
  }
}
