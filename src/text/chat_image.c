/* The grid of an image in a prompt: how many positions its placeholder becomes (chat.md 8).
 *
 * The arithmetic is the preprocessor's, in double precision and in its order, since a prompt's length must not depend
 * on who computes it. Decoding and resizing pixels is left to the vision part of the model. */
#include <math.h>

#include "chat.h"

enum {
    PATCH = 14,           /* pixels */
    MERGE = 3,            /* patches of a position, each way */
    POSITIONS_MAX = 1024, /* of one image, marks included */
    AREA_MIN = 295936     /* pixels; smaller images are scaled up */
};

static int64_t round_up(int64_t v, int64_t unit) {
    return (v + unit - 1) / unit * unit;
}

static void set_grid(di_image_grid *grid, int64_t width_pixels, int64_t height_pixels) {
    grid->width_pixels = width_pixels;
    grid->height_pixels = height_pixels;
    grid->width = (width_pixels / PATCH + MERGE - 1) / MERGE;
    grid->height = (height_pixels / PATCH + MERGE - 1) / MERGE;
    grid->n_positions = grid->height * (grid->width + 1) + 2;
}

di_status di_image_grid_of(int64_t width, int64_t height, di_image_grid *grid, di_error *err) {
    if (width < 1 || height < 1 || width > INT32_MAX || height > INT32_MAX) {
        return di_fail(err, DI_ERR_RANGE, "image of %lld x %lld pixels, expected 1 to %d each way", (long long)width,
                       (long long)height, INT32_MAX);
    }
    int64_t w = width, h = height;
    if (w * h < AREA_MIN) {
        /* Truncation may leave the area just below the limit, so the scaling repeats until the padded size reaches it.
         */
        do {
            double factor = sqrt((double)AREA_MIN / ((double)w * (double)h));
            int64_t next_w = (int64_t)((double)w * factor), next_h = (int64_t)((double)h * factor);
            if (next_w == w && next_h == h) {
                break;
            }
            w = next_w;
            h = next_h;
        } while (w > 0 && h > 0 && round_up(w, PATCH) * round_up(h, PATCH) < AREA_MIN);
    }
    set_grid(grid, round_up(w, PATCH), round_up(h, PATCH));
    if (grid->n_positions <= POSITIONS_MAX) {
        return DI_OK;
    }
    double ratio = (double)h / (double)w;
    double most_wide = sqrt((POSITIONS_MAX - 2) / ratio + 0.25) - 0.5;
    double most_high = most_wide * ratio;
    const int64_t cell = PATCH * MERGE;
    if (most_wide < 1) {
        set_grid(grid, cell, (POSITIONS_MAX - 2) / 2 * cell);
    } else if (most_high < 1) {
        set_grid(grid, (POSITIONS_MAX - 3) * cell, cell);
    } else {
        double scale_wide = floor(most_wide) * (double)cell / (double)w;
        double scale_high = floor(most_high) * (double)cell / (double)h;
        double scale = DI_MIN(scale_wide, scale_high);
        set_grid(grid, (int64_t)floor((double)w * scale / PATCH) * PATCH,
                 (int64_t)floor((double)h * scale / PATCH) * PATCH);
    }
    return DI_OK;
}
