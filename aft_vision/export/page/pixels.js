// timm's evaluation transform: the resize of Pillow, in integers, and the centre crop of torchvision.

// Pillow's fixed-point numbers of 8 bits and their weights.
const PRECISION = 22;
// Support and weight at a distance x >= 0.
const FILTERS = {
  bilinear: [1, (x) => Math.max(1 - x, 0)],
  bicubic: [2, (x) => (x < 1 ? (1.5 * x - 2.5) * x * x + 1 : x < 2 ? (((x - 5) * x + 8) * x - 4) * -0.5 : 0)],
};

// Round half to even, as Python.
function round(x) {
  const near = Math.round(x);
  return near - x === 0.5 && near % 2 ? near - 1 : near;
}

// Return (height, width) of the whole image after the resize.
function resizedSize(height, width, { input_size: [, ...sides], crop_pct, crop_mode }) {
  const [rows, columns] = sides.map((side) => Math.floor(side / crop_pct));
  if (crop_mode === 'squash') return [rows, columns];
  if (crop_mode !== 'border' && rows === columns) {
    return [height, width].map((side) => Math.floor((rows * side) / Math.min(height, width)));
  }
  const ratio = Math[crop_mode === 'border' ? 'max' : 'min'](height / rows, width / columns);
  return [height, width].map((side) => Math.max(round(side / ratio), 1));
}

// For each kept output pixel of an axis, the first input pixel and the weights; null outside of the image.
function findTaps(source, resized, kept, interpolation) {
  const [support, filter] = FILTERS[interpolation];
  const scale = source / resized, stretch = Math.max(scale, 1);
  const start = resized < kept ? -Math.floor((kept - resized) / 2) : round((resized - kept) / 2);
  return Array.from({ length: kept }, (_, index) => {
    const place = start + index, center = (place + 0.5) * scale;
    if (place < 0 || place >= resized) return null;
    const first = Math.max(Math.trunc(center - support * stretch + 0.5), 0);
    const end = Math.min(Math.trunc(center + support * stretch + 0.5), source);
    const weights = [];
    for (let x = first; x < end; x++) weights.push(filter(Math.abs((x - center + 0.5) * (1 / stretch))));
    const sum = weights.reduce((a, b) => a + b);
    return { first, weights: Int32Array.from(weights, (w) => (w / sum) * 2 ** PRECISION + Math.sign(w) * 0.5) };
  });
}

// Weigh the numbers of one channel, from a place on.
function weigh(data, place, step, weights) {
  let sum = 2 ** (PRECISION - 1);
  for (let i = 0; i < weights.length; i++, place += step) sum += data[place] * weights[i];
  return sum >> PRECISION;
}

// Resample one axis of an image { data, width, height, stride }, whose pixels are stride numbers apart.
function resample({ data, width, height, stride }, taps, vertical, fill) {
  const out = { width: vertical ? width : taps.length, height: vertical ? taps.length : height, stride: fill.length };
  const step = vertical ? width * stride : stride;
  out.data = new Uint8ClampedArray(out.width * out.height * out.stride);
  let index = 0;
  for (let y = 0; y < out.height; y++) {
    for (let x = 0; x < out.width; x++) {
      const tap = taps[vertical ? y : x], start = (vertical ? x : y * width) * stride;
      for (let channel = 0; channel < out.stride; channel++) {
        out.data[index++] = tap ? weigh(data, start + tap.first * step + channel, step, tap.weights) : fill[channel];
      }
    }
  }
  return out;
}

// Resize and crop an image { data, width, height } of RGBA pixels to uint8 (rows, columns, channels).
export function crop({ data, width, height }, model) {
  const [channels, rows, columns] = model.input_size;
  if (channels === 1) {
    for (let i = 0; i < data.length; i += 4) {
      data[i] = (data[i] * 19595 + data[i + 1] * 38470 + data[i + 2] * 7471 + 0x8000) >> 16;
    }
  }
  const fill = model.mean.map((mean) => (model.crop_mode === 'border' ? round(255 * mean) : 0));
  const [resizedHeight, resizedWidth] = resizedSize(height, width, model);
  const across = findTaps(width, resizedWidth, columns, model.interpolation);
  const down = findTaps(height, resizedHeight, rows, model.interpolation);
  // Pillow 13 begins with the height if that loses more than twice as many pixels; older ones never do.
  const tall = height - resizedHeight > Math.max(2 * (width - resizedWidth), 0);
  const first = resample({ data, width, height, stride: 4 }, tall ? down : across, tall, fill);
  return resample(first, tall ? across : down, !tall, fill).data;
}

// Return the float32 input (channels, rows, columns) of the model for an image of RGBA pixels.
export function prepare(image, model) {
  const [channels, rows, columns] = model.input_size, pixels = crop(image, model);
  return Float32Array.from({ length: pixels.length }, (_, index) => {
    const channel = Math.floor(index / (rows * columns)), place = index % (rows * columns);
    return (pixels[place * channels + channel] / 255 - model.mean[channel]) / model.std[channel];
  });
}
