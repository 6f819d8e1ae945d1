// Resizing as in Pillow (Resample.c, bilinear, 8 bits a channel), so that the network sees the same pixels as in training:
// a canvas resizes differently, which changes confidences.
// An image is {data, width, height, step}: `step` bytes a pixel, red, green and blue first.

const BITS = 22; // of a weight, after the binary point

// The weights of the inputs for each of `size` outputs, between `from` and `to` of all `inputs`.
// Pillow computes the box in single precision.
function weights(inputs, from, to, size) {
  const start = Math.fround(from), scale = Math.fround(Math.fround(to) - start) / size;
  const support = Math.max(scale, 1), inverse = 1 / support;
  return Array.from({ length: size }, (_, i) => {
    const center = start + (i + 0.5) * scale;
    const first = Math.max(0, Math.trunc(center - support + 0.5));
    const last = Math.min(inputs, Math.trunc(center + support + 0.5));
    const parts = new Float64Array(last - first).map((_, j) => Math.max(0, 1 - Math.abs((j + first - center + 0.5) * inverse)));
    const sum = parts.reduce((all, part) => all + part, 0);
    return { first, parts: Int32Array.from(parts, (part) => Math.trunc(0.5 + (part / sum) * 2 ** BITS)) };
  });
}

// One pass over `lines`: the pixels of each are resized to one a list of weights. In `data`, pixels are `pixel` and lines `line`
// bytes apart; in `made`, `madePixel` and `madeLine`.
function pass(data, { pixel, line }, made, { madePixel, madeLine }, lines, weighted) {
  for (let y = 0; y < lines; y += 1) {
    weighted.forEach(({ first, parts }, i) => {
      for (let channel = 0; channel < 3; channel += 1) {
        let sum = 2 ** (BITS - 1), at = y * line + first * pixel + channel;
        for (let j = 0; j < parts.length; j += 1, at += pixel) sum += data[at] * parts[j];
        made[y * madeLine + i * madePixel + channel] = sum >> BITS; // the array clamps it
      }
    });
  }
}

// The box from (left, top) to (right, bottom) at wide x high: first along the rows, then along the columns, rounded in between. Pillow 13
// starts with the columns of tall images, where a value may differ by 1.
function resized({ data, width, height, step }, [left, top, right, bottom], wide, high) {
  const rows = new Uint8ClampedArray(height * wide * 3), made = new Uint8ClampedArray(high * wide * 3);
  pass(data, { pixel: step, line: width * step }, rows, { madePixel: 3, madeLine: wide * 3 }, height, weights(width, left, right, wide));
  pass(rows, { pixel: wide * 3, line: 3 }, made, { madePixel: wide * 3, madeLine: 3 }, wide, weights(height, top, bottom, high));
  return { data: made, width: wide, height: high, step: 3 };
}

// The center square of an image at size x size.
function center(image, side, size) {
  const left = (image.width - side) / 2, top = (image.height - side) / 2;
  return resized(image, [left, top, left + side, top + side], size, size).data;
}

// All of an image, its longer side at `size`, in the middle of a gray square.
function letterboxed(image, size) {
  const longer = Math.max(image.width, image.height), made = new Uint8ClampedArray(size * size * 3).fill(128);
  const [wide, high] = [image.width, image.height].map((side) => Math.max(1, even((size * side) / longer)));
  const part = resized(image, [0, 0, image.width, image.height], wide, high).data;
  const left = Math.floor((size - wide) / 2), top = Math.floor((size - high) / 2);
  for (let y = 0; y < high; y += 1) made.set(part.subarray(y * wide * 3, (y + 1) * wide * 3), ((top + y) * size + left) * 3);
  return made;
}

// Rounds as Python does: halves to the even neighbor.
function even(value) {
  const low = Math.floor(value);
  return value - low === 0.5 ? low + (low % 2) : Math.round(value);
}

// What the network sees of an image, (3, size, size): the center square at `shorter`, and of that the center; or all of it.
export function seen(image, shorter, size, whole) {
  const side = Math.min(image.width, image.height), edge = (shorter - size) / 2;
  let data = whole ? letterboxed(image, size) : center(image, side, shorter);
  if (edge && !whole) data = center({ data, width: shorter, height: shorter, step: 3 }, size, size);
  return Uint8Array.from({ length: data.length }, (_, i) => data[(i % (size * size)) * 3 + Math.floor(i / (size * size))]);
}
