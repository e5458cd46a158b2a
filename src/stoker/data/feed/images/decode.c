/* Images of one batch: read, checked, decoded, cropped, resized and flipped by threads of its own.
 *
 * One call of stoker_decode is one batch. Each image is a job: where its bytes lie, what they must
 * hash to, and which box of it is wanted. Of a JPEG only the rows and columns of the box go through
 * the inverse DCT, at the smallest of the scales 1/8, 1/4, 1/2, 1 that is at least as large as the
 * result; what lies below the box is not even entropy-decoded.
 *
 * `exact` gives what the exported graph gives: the full scale and fancy upsampling, as
 * tf.io.decode_jpeg(dct_method="INTEGER_ACCURATE"). The resize is separable and in float32, rounded
 * half to even: tf.image.resize, bilinear, with or without antialias.
 *
 * Nothing here trusts an image: libjpeg's errors come back through longjmp, sizes must be those
 * that ingest wrote down, and every buffer is as large as the box asks.
 */
#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <jerror.h>
#include <jpeglib.h>

#if defined(__SSE4_2__)
#include <nmmintrin.h>
#elif defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>
#endif

enum status {
  DONE = 0,
  OTHER_FORMAT = 1, /* neither JPEG nor raw pixels: the caller decodes it */
  CUT = 2,          /* the file ended, or could not be read */
  DAMAGED = 3,      /* another CRC32C */
  BROKEN = 4,       /* libjpeg cannot decode it */
  OTHER_SIZE = 5,   /* its header says another size */
  NO_MEMORY = 6,
};

struct job { /* mirrored by JOB in decode.py */
  const uint8_t *data; /* the encoded bytes, or NULL: read them from the file */
  int64_t offset, length;
  int32_t file; /* descriptor */
  uint32_t crc32c;
  int32_t height, width; /* upright, as ingest found them */
  float x, y, box_width, box_height; /* the box, upright, in pixels of the whole image */
  int32_t orientation;               /* EXIF, 1 to 8 */
  int32_t flip;                      /* mirror left and right */
  int32_t status;
  int32_t unused;
};

struct output {
  uint8_t *pixels; /* [jobs, height, width, channels] */
  int32_t height, width, channels;
  int32_t exact;
  int32_t antialias;
};

struct buffer {
  uint8_t *bytes;
  size_t size;
};

struct worker {
  struct jpeg_decompress_struct jpeg;
  struct jpeg_error_mgr errors;
  jmp_buf failed;
  struct buffer encoded, pixels, columns, rows, line;
};

/* A part of an image in memory, and where it lies in the whole (scaled) image. */
struct part {
  const uint8_t *pixels;
  size_t stride; /* bytes from row to row */
  int left, top, width, height;
};

/* Of one output pixel along one axis: the first input pixel and the weights from there on. */
struct taps {
  int first, count;
  float *weights;
};

static uint8_t *room(struct buffer *buffer, size_t size) {
  if (size > buffer->size) {
    free(buffer->bytes);
    buffer->bytes = malloc(size);
    buffer->size = buffer->bytes ? size : 0;
  }
  return buffer->bytes;
}

static int smaller(int a, int b) { return a < b ? a : b; }
static int larger(int a, int b) { return a > b ? a : b; }

/* CRC32C */

#if defined(__SSE4_2__)
#define BY_INSTRUCTION 1
static inline uint32_t crc_word(uint32_t crc, uint64_t word) {
  return (uint32_t)_mm_crc32_u64(crc, word);
}
static inline uint32_t crc_byte(uint32_t crc, uint8_t byte) { return _mm_crc32_u8(crc, byte); }
#elif defined(__ARM_FEATURE_CRC32)
#define BY_INSTRUCTION 1
static inline uint32_t crc_word(uint32_t crc, uint64_t word) { return __crc32cd(crc, word); }
static inline uint32_t crc_byte(uint32_t crc, uint8_t byte) { return __crc32cb(crc, byte); }
#endif

#ifdef BY_INSTRUCTION
/* The instruction takes three cycles and another can begin in each: three lanes of bytes at once. */
enum { LANE = 4096 };

static uint32_t lane_of_zeros[4][256]; /* what LANE zero bytes make of each byte of a CRC */

__attribute__((constructor)) static void make_crc_tables(void) {
  for (int bit = 0; bit < 32; bit++) {
    uint32_t crc = 1u << bit;
    for (int word = 0; word < LANE / 8; word++) crc = crc_word(crc, 0);
    for (int byte = 0; byte < 256; byte++)
      if (byte >> bit % 8 & 1) lane_of_zeros[bit / 8][byte] ^= crc;
  }
}

static uint32_t after_lane(uint32_t crc) {
  return lane_of_zeros[0][crc & 255] ^ lane_of_zeros[1][crc >> 8 & 255] ^
         lane_of_zeros[2][crc >> 16 & 255] ^ lane_of_zeros[3][crc >> 24];
}

static uint32_t crc32c(const uint8_t *bytes, size_t size) {
  uint32_t crc = 0xffffffffu;
  uint64_t words[3];
  for (; size >= 3 * LANE; bytes += 3 * LANE, size -= 3 * LANE) {
    uint32_t second = 0, third = 0;
    for (const uint8_t *at = bytes, *end = bytes + LANE; at < end; at += 8) {
      for (int lane = 0; lane < 3; lane++) memcpy(&words[lane], at + lane * LANE, 8);
      crc = crc_word(crc, words[0]);
      second = crc_word(second, words[1]);
      third = crc_word(third, words[2]);
    }
    crc = after_lane(after_lane(crc) ^ second) ^ third;
  }
  for (; size >= 8; bytes += 8, size -= 8) {
    memcpy(words, bytes, 8);
    crc = crc_word(crc, words[0]);
  }
  for (; size; bytes++, size--) crc = crc_byte(crc, *bytes);
  return ~crc;
}
#else
static uint32_t crc_table[256];

__attribute__((constructor)) static void make_crc_table(void) {
  for (uint32_t byte = 0; byte < 256; byte++) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; bit++) crc = (crc >> 1) ^ (0x82f63b78u & (0u - (crc & 1)));
    crc_table[byte] = crc;
  }
}

static uint32_t crc32c(const uint8_t *bytes, size_t size) {
  uint32_t crc = 0xffffffffu;
  for (; size; bytes++, size--) crc = (crc >> 8) ^ crc_table[(crc ^ *bytes) & 255];
  return ~crc;
}
#endif

/* Reading */

static const uint8_t *encoded_bytes(struct worker *worker, struct job *job) {
  if (job->data) return job->data;
  uint8_t *bytes = room(&worker->encoded, (size_t)job->length);
  if (!bytes) {
    job->status = NO_MEMORY;
    return NULL;
  }
  int64_t done = 0;
  while (done < job->length) {
    ssize_t got = pread(job->file, bytes + done, (size_t)(job->length - done), job->offset + done);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) {
      job->status = CUT;
      return NULL;
    }
    done += got;
  }
  if (crc32c(bytes, (size_t)job->length) != job->crc32c) {
    job->status = DAMAGED;
    return NULL;
  }
  return bytes;
}

/* Resizing */

/* Weights of a triangle filter, as tf.image.resize has them.
 *
 * Output pixel i looks at `start + (i + 0.5) * extent / size`; inputs are [low, high).
 * Source: TensorFlow, core/kernels/image/scale_and_translate_op.cc, ComputeSpansCore.
 */
static int make_taps(struct buffer *memory, struct taps **made, float start, float extent, int size,
                     int low, int high, int antialias) {
  float scale = extent / (float)size;
  float reach = antialias && scale > 1.0f ? scale : 1.0f;
  int most = 2 * (int)ceilf(reach) + 1;
  uint8_t *bytes = room(memory, (size_t)size * (sizeof(struct taps) + (size_t)most * sizeof(float)));
  if (!bytes) return 0;
  struct taps *taps = (struct taps *)bytes;
  float *weights = (float *)(bytes + (size_t)size * sizeof(struct taps));
  for (int i = 0; i < size; i++, weights += most) {
    float at = start + ((float)i + 0.5f) * scale;
    int first = (int)ceilf(at - reach - 0.5f), last = (int)floorf(at + reach - 0.5f);
    first = first < low ? low : first > high - 1 ? high - 1 : first;
    last = last < first ? first : last > high - 1 ? high - 1 : last;
    if (last - first + 1 > most) last = first + most - 1;
    float total = 0.0f;
    for (int source = first; source <= last; source++) {
      float away = fabsf((float)source + 0.5f - at) / reach;
      float weight = away < 1.0f ? 1.0f - away : 0.0f;
      weights[source - first] = weight;
      total += weight;
    }
    for (int tap = 0; tap <= last - first; tap++)
      weights[tap] = total > 0.0f ? weights[tap] / total : 1.0f / (float)(last - first + 1);
    /* Weights of zero at the ends are most of the work where nothing is made smaller. */
    while (first < last && weights[last - first] == 0.0f) last--;
    taps[i] = (struct taps){first, last - first + 1, weights};
  }
  *made = taps;
  return 1;
}

/* Give all outputs equally many taps, so that loops over them can be unrolled: some weigh nothing.
 * Inputs are counted from `low`; where outputs are `mirrored`, the last comes first. */
static int even_taps(struct taps *taps, int size, int low, int high, int mirrored) {
  int most = 0;
  for (int i = 0; i < size; i++) most = larger(most, taps[i].count);
  if (most > high - low) most = 0;
  for (int i = 0; most && i < size; i++) {
    int count = taps[i].count, before = larger(taps[i].first + most - high, 0);
    float *weights = taps[i].weights;
    memmove(weights + before, weights, (size_t)count * sizeof *weights);
    for (int tap = 0; tap < before; tap++) weights[tap] = 0.0f;
    for (int tap = before + count; tap < most; tap++) weights[tap] = 0.0f;
    taps[i] = (struct taps){taps[i].first - before, most, weights};
  }
  for (int i = 0; i < size; i++) taps[i].first -= low;
  for (int i = 0; mirrored && i < size / 2; i++) {
    struct taps kept = taps[i];
    taps[i] = taps[size - 1 - i];
    taps[size - 1 - i] = kept;
  }
  return most;
}

/* The rows of one output row, weighted: a line of floats. Two at a time, as each pass costs memory. */
static void add_rows(float *restrict line, const struct part *part, const struct taps *taps,
                     int channels) {
  int count = part->width * channels;
  for (int tap = 0; tap < taps->count; tap += 2) {
    int has_second = tap + 1 < taps->count;
    const uint8_t *restrict one =
        part->pixels + (size_t)(taps->first + tap - part->top) * part->stride;
    const uint8_t *restrict two = has_second ? one + part->stride : one;
    float weight = taps->weights[tap], second = has_second ? taps->weights[tap + 1] : 0.0f;
    if (tap == 0)
      for (int i = 0; i < count; i++) line[i] = weight * (float)one[i] + second * (float)two[i];
    else
      for (int i = 0; i < count; i++) line[i] += weight * (float)one[i] + second * (float)two[i];
  }
}

typedef float four __attribute__((vector_size(16), aligned(4)));
typedef uint32_t four_bits __attribute__((vector_size(16), aligned(4)));
typedef uint8_t sixteen __attribute__((vector_size(16)));

/* Added to a float in [0, 2^22) it leaves the number, rounded half to even, in the low bits. */
static const float ROUNDING = 12582912.0f; /* 1.5 * 2^23 */

/* One pixel of three channels; the fourth byte is its neighbor's. */
static inline __attribute__((always_inline)) uint32_t color(const float *at, const float *weights,
                                                            int count) {
  four sum = *(const four *)at * weights[0];
  for (int tap = 1; tap < count; tap++) sum += *(const four *)(at + 3 * tap) * weights[tap];
  sixteen bytes = (sixteen)(four_bits)(sum + ROUNDING);
  bytes = __builtin_shuffle(bytes, (sixteen){0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12});
  return ((four_bits)bytes)[0];
}

static inline __attribute__((always_inline)) void write_colors(uint8_t *out, ptrdiff_t step,
                                                               const float *line,
                                                               const struct taps *taps, int count,
                                                               int even) {
  int i = 0;
  /* Four bytes at once: the next pixel, in the same row, is written over the fourth. */
  for (; step == 3 && i < count - 1; i++, out += 3) {
    uint32_t pixel = color(line + 3 * taps[i].first, taps[i].weights, even ? even : taps[i].count);
    memcpy(out, &pixel, 4);
  }
  for (; i < count; i++, out += step) {
    uint32_t pixel = color(line + 3 * taps[i].first, taps[i].weights, even ? even : taps[i].count);
    memcpy(out, &pixel, 3);
  }
}

/* One output row: `step` is the way from pixel to pixel, `even` the taps of each, 0 where they
 * differ. The weights are positive and add up to 1, so a sum lies within 0 and 255. */
static void write_row(uint8_t *out, ptrdiff_t step, const float *line, const struct taps *taps,
                      int count, int even, int channels) {
  if (channels == 3) {
    switch (even) {
      case 1: return write_colors(out, step, line, taps, count, 1);
      case 2: return write_colors(out, step, line, taps, count, 2);
      case 3: return write_colors(out, step, line, taps, count, 3);
      case 4: return write_colors(out, step, line, taps, count, 4);
      default: return write_colors(out, step, line, taps, count, even);
    }
  }
  for (int i = 0; i < count; i++, out += step) {
    const float *from = line + taps[i].first, *weights = taps[i].weights;
    float sum = from[0] * weights[0];
    for (int tap = 1; tap < taps[i].count; tap++) sum += from[tap] * weights[tap];
    out[0] = (uint8_t)(int)rintf(sum);
  }
}

/* The box of an image as it lies in the file, before it is turned upright. */
struct box {
  float x, y, width, height;
};

static struct box lying_box(const struct job *job) {
  float x = job->x, y = job->y, w = job->box_width, h = job->box_height;
  float right = (float)job->width - x - w, below = (float)job->height - y - h;
  switch (job->orientation) {
    case 2: return (struct box){right, y, w, h};
    case 3: return (struct box){right, below, w, h};
    case 4: return (struct box){x, below, w, h};
    case 5: return (struct box){y, x, h, w};
    case 6: return (struct box){y, right, h, w};
    case 7: return (struct box){below, right, h, w};
    case 8: return (struct box){below, x, h, w};
    default: return (struct box){x, y, w, h};
  }
}

/* Whether the box is as large as the result and at whole pixels, all of them in the part: every weight
 * is one, and nothing is to be computed. */
static int is_as_it_is(const struct part *part, struct box box, float scale, int width, int height) {
  return scale == 1.0f && box.width == (float)width && box.height == (float)height &&
         box.x == (float)part->left && box.y == (float)part->top && part->width >= width &&
         part->height >= height;
}

/* Pixels of three channels, the last one first. */
static void mirror_colors(uint8_t *out, const uint8_t *from, int width) {
  const uint8_t *at = from + 3 * width;
  /* Five and a byte at once: the next five are written over that byte. */
  for (; at - from >= 18; out += 15) {
    sixteen bytes;
    memcpy(&bytes, at - 16, 16);
    bytes = __builtin_shuffle(bytes,
                              (sixteen){13, 14, 15, 10, 11, 12, 7, 8, 9, 4, 5, 6, 1, 2, 3, 0});
    memcpy(out, &bytes, 16);
    at -= 15;
  }
  for (; at > from; out += 3) {
    at -= 3;
    memcpy(out, at, 3);
  }
}

/* `step` is the way from pixel to pixel, `next` from row to row. */
static void copy_pixels(uint8_t *out, ptrdiff_t step, ptrdiff_t next, const struct part *part,
                        int width, int height, int channels) {
  const uint8_t *from = part->pixels;
  for (int row = 0; row < height; row++, out += next, from += part->stride) {
    if (step == channels)
      memcpy(out, from, (size_t)width * (size_t)channels);
    else if (step == -3 && channels == 3)
      mirror_colors(out - 3 * (width - 1), from, width);
    else
      for (int i = 0; i < width; i++) memcpy(out + i * step, from + i * channels, (size_t)channels);
  }
}

static int resize(struct worker *worker, const struct part *part, struct box box, float scale,
                  const struct job *job, const struct output *to, uint8_t *out) {
  int turned = job->orientation >= 5;
  int width = turned ? to->height : to->width, height = turned ? to->width : to->height;
  /* From pixel to pixel and from row to row of the upright image; then the image's own turn. */
  ptrdiff_t across = to->channels, down = (ptrdiff_t)to->width * to->channels;
  uint8_t *start = out;
  if (job->flip) {
    start += (to->width - 1) * across;
    across = -across;
  }
  int o = job->orientation;
  if (o == 2 || o == 3 || o == 6 || o == 7) {
    start += (to->width - 1) * across;
    across = -across;
  }
  if (o == 3 || o == 4 || o == 7 || o == 8) {
    start += (to->height - 1) * down;
    down = -down;
  }
  ptrdiff_t step = turned ? down : across, next = turned ? across : down;
  if (is_as_it_is(part, box, scale, width, height)) {
    copy_pixels(start, step, next, part, width, height, to->channels);
    return 1;
  }

  struct taps *columns, *rows;
  size_t floats = (size_t)part->width * (size_t)to->channels + 4;
  float *line = (float *)room(&worker->line, floats * sizeof(float));
  if (!line ||
      !make_taps(&worker->columns, &columns, box.x * scale, box.width * scale, width, part->left,
                 part->left + part->width, to->antialias) ||
      !make_taps(&worker->rows, &rows, box.y * scale, box.height * scale, height, part->top,
                 part->top + part->height, to->antialias))
    return 0;
  memset(line + floats - 4, 0, 4 * sizeof(float));
  int mirrored = step < 0;
  if (mirrored) {
    start += (width - 1) * step;
    step = -step;
  }
  int even = even_taps(columns, width, part->left, part->left + part->width, mirrored);
  for (int row = 0; row < height; row++, start += next) {
    add_rows(line, part, &rows[row], to->channels);
    write_row(start, step, line, columns, width, even, to->channels);
  }
  return 1;
}

/* JPEG */

static void on_error(j_common_ptr jpeg) { longjmp(((struct worker *)jpeg)->failed, 1); }

static void on_message(j_common_ptr jpeg, int level) {
  /* An image that ends early is not an image; other warnings TensorFlow lets pass, too. */
  if (level < 0 && jpeg->err->msg_code == JWRN_JPEG_EOF) on_error(jpeg);
}

static void on_output(j_common_ptr jpeg) { (void)jpeg; }

/* The smallest scale, of 8 eighths, that has no fewer pixels than the result. */
static int eighths(struct box box, int width, int height) {
  for (int scale = 1; scale < 8; scale *= 2)
    if (box.width * (float)scale >= 8.0f * (float)width &&
        box.height * (float)scale >= 8.0f * (float)height)
      return scale;
  return 8;
}

/* Source: TensorFlow, core/lib/jpeg/jpeg_mem.cc. */
static void cmyk_to_rgb(uint8_t *row, int width, int adobe) {
  for (int i = 0; i < width; i++) {
    const uint8_t *from = row + 4 * i;
    int c = from[0], m = from[1], y = from[2], k = from[3];
    uint8_t *to = row + 3 * i;
    to[0] = (uint8_t)(adobe ? k * c / 255 : (255 - k) * (255 - c) / 255);
    to[1] = (uint8_t)(adobe ? k * m / 255 : (255 - k) * (255 - m) / 255);
    to[2] = (uint8_t)(adobe ? k * y / 255 : (255 - k) * (255 - y) / 255);
  }
}

static enum status decode_jpeg(struct worker *worker, const uint8_t *data, const struct job *job,
                               const struct output *to, uint8_t *out) {
  struct jpeg_decompress_struct *jpeg = &worker->jpeg;
  if (setjmp(worker->failed)) {
    jpeg_abort_decompress(jpeg);
    return BROKEN;
  }
  jpeg_mem_src(jpeg, data, (unsigned long)job->length);
  jpeg_read_header(jpeg, TRUE);
  int turned = job->orientation >= 5;
  int is_cmyk = jpeg->jpeg_color_space == JCS_CMYK || jpeg->jpeg_color_space == JCS_YCCK;
  if ((int)jpeg->image_width != (turned ? job->height : job->width) ||
      (int)jpeg->image_height != (turned ? job->width : job->height)) {
    jpeg_abort_decompress(jpeg);
    return OTHER_SIZE;
  }
  struct box box = lying_box(job);
  jpeg->out_color_space = to->channels == 1 ? JCS_GRAYSCALE : is_cmyk ? JCS_CMYK : JCS_RGB;
  jpeg->dct_method = JDCT_ISLOW;
  jpeg->do_fancy_upsampling = TRUE;
  jpeg->scale_denom = 8;
  jpeg->scale_num = to->exact ? 8
                              : (unsigned)eighths(box, turned ? to->height : to->width,
                                                  turned ? to->width : to->height);
  float scale = (float)jpeg->scale_num / 8.0f;
  jpeg_start_decompress(jpeg);

  int width = (int)jpeg->output_width, height = (int)jpeg->output_height;
  int left = smaller(larger((int)floorf(box.x * scale), 0), width - 1);
  int right = smaller(larger((int)ceilf((box.x + box.width) * scale), left + 1), width);
  int top = smaller(larger((int)floorf(box.y * scale), 0), height - 1);
  int bottom = smaller(larger((int)ceilf((box.y + box.height) * scale), top + 1), height);
  JDIMENSION from = 0, wide = (JDIMENSION)width;
  if (!to->exact && right - left < width) {
    /* One pixel more on each side: upsampling looks at a neighbor, which the cut takes away. */
    from = (JDIMENSION)larger(left - 1, 0);
    wide = (JDIMENSION)smaller(right + 1, width) - from;
    jpeg_crop_scanline(jpeg, &from, &wide);
  }
  int components = jpeg->output_components;
  size_t stride = (size_t)wide * (size_t)components;
  int rows = bottom - top;
  uint8_t *pixels = room(&worker->pixels, stride * (size_t)rows + 4);
  if (!pixels) {
    jpeg_abort_decompress(jpeg);
    return NO_MEMORY;
  }
  if (!to->exact && top > 0)
    jpeg_skip_scanlines(jpeg, (JDIMENSION)top);
  else
    for (int row = 0; row < top; row++) jpeg_read_scanlines(jpeg, &(JSAMPROW){pixels}, 1);
  for (int row = 0; row < rows;) {
    JSAMPROW line = pixels + (size_t)row * stride;
    if (!jpeg_read_scanlines(jpeg, &line, 1)) break;
    if (components == 4) cmyk_to_rgb(line, (int)wide, jpeg->saw_Adobe_marker);
    row++;
  }
  jpeg_abort_decompress(jpeg);
  struct part part = {pixels + (size_t)(left - (int)from) * (size_t)to->channels, stride, left, top,
                      right - left, rows};
  return resize(worker, &part, box, scale, job, to, out) ? DONE : NO_MEMORY;
}

/* Raw pixels: "RAW", channels, height and width as little-endian uint32, then the pixels. */

static uint32_t little_endian(const uint8_t *at) {
  return (uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
}

static enum status resize_raw(struct worker *worker, const uint8_t *data, const struct job *job,
                              const struct output *to, uint8_t *out) {
  uint64_t height = little_endian(data + 4), width = little_endian(data + 8);
  if (data[3] != to->channels || (int64_t)height != job->height || (int64_t)width != job->width ||
      (uint64_t)job->length != 12 + height * width * data[3] || job->orientation != 1)
    return OTHER_SIZE;
  struct part part = {data + 12, width * data[3], 0, 0, (int)width, (int)height};
  struct box box = lying_box(job);
  /* Only the box is looked at, as of a JPEG. */
  part.left = smaller(larger((int)floorf(box.x), 0), (int)width - 1);
  part.top = smaller(larger((int)floorf(box.y), 0), (int)height - 1);
  part.width = smaller(larger((int)ceilf(box.x + box.width), part.left + 1), (int)width) - part.left;
  part.height = smaller(larger((int)ceilf(box.y + box.height), part.top + 1), (int)height) - part.top;
  part.pixels += (size_t)part.top * part.stride + (size_t)part.left * data[3];
  return resize(worker, &part, box, 1.0f, job, to, out) ? DONE : NO_MEMORY;
}

static enum status do_job(struct worker *worker, struct job *job, const struct output *to,
                          uint8_t *out) {
  const uint8_t *data = encoded_bytes(worker, job);
  if (!data) return (enum status)job->status;
  if (job->length >= 12 && !memcmp(data, "RAW", 3)) return resize_raw(worker, data, job, to, out);
  if (job->length >= 3 && !memcmp(data, "\xff\xd8\xff", 3))
    return decode_jpeg(worker, data, job, to, out);
  return OTHER_FORMAT;
}

/* Threads */

struct batch {
  struct job *jobs;
  int count;
  const struct output *to;
  atomic_int next;
};

static void *work(void *given) {
  struct batch *batch = given;
  struct worker *worker = calloc(1, sizeof *worker);
  if (!worker) return NULL;
  worker->jpeg.err = jpeg_std_error(&worker->errors);
  worker->errors.error_exit = on_error;
  worker->errors.emit_message = on_message;
  worker->errors.output_message = on_output;
  int ready = 0;
  if (!setjmp(worker->failed)) {
    jpeg_create_decompress(&worker->jpeg);
    ready = 1;
  }
  const struct output *to = batch->to;
  size_t image = (size_t)to->height * (size_t)to->width * (size_t)to->channels;
  while (ready) {
    int index = atomic_fetch_add(&batch->next, 1);
    if (index >= batch->count) break;
    struct job *job = &batch->jobs[index];
    job->status = do_job(worker, job, to, to->pixels + (size_t)index * image);
  }
  jpeg_destroy_decompress(&worker->jpeg);
  free(worker->encoded.bytes);
  free(worker->pixels.bytes);
  free(worker->columns.bytes);
  free(worker->rows.bytes);
  free(worker->line.bytes);
  free(worker);
  return NULL;
}

void stoker_decode(struct job *jobs, int count, const struct output *to, int threads) {
  struct batch batch = {jobs, count, to, 0};
  for (int index = 0; index < count; index++) jobs[index].status = NO_MEMORY;
  pthread_t others[threads > 1 ? threads - 1 : 1];
  int started = 0;
  while (started < threads - 1 && started < count - 1 &&
         !pthread_create(&others[started], NULL, work, &batch))
    started++;
  work(&batch);
  while (started) pthread_join(others[--started], NULL);
}
