// Resizing as Pillow does it (Resample.c, bilinear, 8 bits a channel), so that the network sees the pixels that it has
// learned from: a canvas resizes otherwise, and that changes confidences.
// An image is {data, width, height, step}: `step` bytes a pixel, red, green and blue first.

const BITS = 22; // of a weight, after the point

// The weights that each of `size` outputs gives to its inputs, between `from` and `to` of all `inputs`.
// Pillow takes the box in single precision.
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

// One pass along `lines`: the pixels of each, `pixel` bytes apart, become as many as there are weights. The lines of `data`
// are `line` bytes apart, those of `made` `madeLine`, and its pixels `madePixel`.
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

// The square from (left, top) at size x size: first along the rows, then along the columns, rounded in between. Pillow 13
// begins with the columns of tall images, where a value may then differ by 1.
function resized({ data, width, height, step }, left, top, side, size) {
  const rows = new Uint8ClampedArray(height * size * 3), made = new Uint8ClampedArray(size * size * 3);
  pass(data, { pixel: step, line: width * step }, rows, { madePixel: 3, madeLine: size * 3 }, height, weights(width, left, left + side, size));
  pass(rows, { pixel: size * 3, line: 3 }, made, { madePixel: size * 3, madeLine: 3 }, size, weights(height, top, top + side, size));
  return { data: made, width: size, height: size, step: 3 };
}

// What the network sees of an image, (3, size, size): the center square at `shorter`, and of that the center.
export function seen(image, shorter, size) {
  const side = Math.min(image.width, image.height), edge = (shorter - size) / 2;
  const square = resized(image, (image.width - side) / 2, (image.height - side) / 2, side, shorter);
  const { data } = edge ? resized(square, edge, edge, size, size) : square;
  return Uint8Array.from({ length: data.length }, (_, i) => data[(i % (size * size)) * 3 + Math.floor(i / (size * size))]);
}
