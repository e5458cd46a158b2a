/* What no decoder can go below: Huffman decoding of all coefficients, no transform, no pixels. */
#include <setjmp.h>
#include <stdio.h>

#include <jpeglib.h>

static jmp_buf failed;
static void on_error(j_common_ptr jpeg) { (void)jpeg; longjmp(failed, 1); }

int entropy_decode(const unsigned char *data, unsigned long size) {
  struct jpeg_decompress_struct jpeg;
  struct jpeg_error_mgr errors;
  jpeg.err = jpeg_std_error(&errors);
  errors.error_exit = on_error;
  jpeg_create_decompress(&jpeg);
  if (setjmp(failed)) {
    jpeg_destroy_decompress(&jpeg);
    return 1;
  }
  jpeg_mem_src(&jpeg, data, size);
  jpeg_read_header(&jpeg, TRUE);
  int missing = jpeg_read_coefficients(&jpeg) == NULL;
  jpeg_destroy_decompress(&jpeg);
  return missing;
}
