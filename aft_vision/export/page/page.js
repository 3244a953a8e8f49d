import { prepare } from './pixels.js';

const RUNTIME = './node_modules/onnxruntime-web/dist/ort.wasm.bundle.min.mjs';
const TOP = 5;
const find = (id) => document.getElementById(id);
const say = (text) => { find('status').textContent = text; };

async function load() {
  const ort = await import(RUNTIME).catch(() => {
    throw new Error(`${RUNTIME} is missing: run "npm install onnxruntime-web@1.30.0" in the folder of this page.`);
  });
  // More need a page that is isolated from other origins.
  ort.env.wasm.numThreads = 1;
  const [session, response] = await Promise.all([ort.InferenceSession.create('model.onnx'), fetch('model.json')]);
  const model = await response.json();
  return async (image) => {
    const images = new ort.Tensor('float32', prepare(image, model), [1, ...model.input_size]);
    const { logits } = await session.run({ images });
    const largest = Math.max(...logits.data);
    const powers = Array.from(logits.data, (logit) => Math.exp(logit - largest));
    const sum = powers.reduce((a, b) => a + b);
    return powers.map((power, index) => ({ name: model.label_names[index], probability: power / sum }));
  };
}

// Decode to RGBA: upright, with the numbers of the file whatever its colour profile and its transparency.
async function decode(file) {
  const options = { imageOrientation: 'from-image', colorSpaceConversion: 'none', premultiplyAlpha: 'none' };
  const bitmap = await createImageBitmap(file, options).catch(() => {
    throw new Error(`${file.name} is no image that this browser can decode.`);
  });
  const { width, height } = bitmap, context = new OffscreenCanvas(width, height).getContext('2d');
  context.drawImage(bitmap, 0, 0);
  const { data } = context.getImageData(0, 0, width, height);
  for (let i = 3; i < data.length; i += 4) {
    if (data[i] < 255) return { data: readTransparent(bitmap), width, height };
  }
  return { data, width, height };
}

// Read a transparent image: a 2D canvas keeps no colours of transparent pixels.
function readTransparent(bitmap) {
  const { width, height } = bitmap, gl = new OffscreenCanvas(1, 1).getContext('webgl');
  if (!gl || Math.max(width, height) > gl.getParameter(gl.MAX_TEXTURE_SIZE)) {
    throw new Error('This browser cannot read transparent pixels of this image: save it without transparency.');
  }
  const data = new Uint8Array(4 * width * height);
  gl.bindTexture(gl.TEXTURE_2D, gl.createTexture());
  gl.texImage2D(gl.TEXTURE_2D, 0, gl.RGBA, gl.RGBA, gl.UNSIGNED_BYTE, bitmap);
  gl.bindFramebuffer(gl.FRAMEBUFFER, gl.createFramebuffer());
  gl.framebufferTexture2D(gl.FRAMEBUFFER, gl.COLOR_ATTACHMENT0, gl.TEXTURE_2D, gl.getParameter(gl.TEXTURE_BINDING_2D), 0);
  gl.readPixels(0, 0, width, height, gl.RGBA, gl.UNSIGNED_BYTE, data);
  return data;
}

function show(file, classes) {
  URL.revokeObjectURL(find('photograph').src);
  find('photograph').src = URL.createObjectURL(file);
  const likely = classes.toSorted((a, b) => b.probability - a.probability).slice(0, TOP);
  find('classes').replaceChildren(...likely.map(({ name, probability }) => {
    const [row, head, meter] = ['tr', 'th', 'meter'].map((tag) => document.createElement(tag));
    Object.assign(head, { scope: 'row', textContent: name });
    Object.assign(meter, { value: probability, ariaLabel: name });
    row.append(head);
    for (const content of [meter, `${(100 * probability).toFixed(1)} %`]) row.insertCell().append(content);
    return row;
  }));
  find('result').hidden = false;
  say(`${file.name}: ${likely[0].name}, ${find('classes').rows[0].lastChild.textContent}`);
}

const classify = load();
let last = classify.then(() => say('Ready.'), (error) => say(error.message));

async function answer(file) {
  find('result').hidden = true;
  say(`Looking at ${file.name} …`);
  try {
    show(file, await (await classify)(await decode(file)));
  } catch (error) {
    say(error.message);
  }
}

// One photograph after the other, in their order.
function ask([file]) {
  if (file) last = last.then(() => answer(file));
}

find('file').addEventListener('change', (event) => ask(event.target.files));
for (const name of ['dragover', 'dragleave', 'drop']) {
  addEventListener(name, (event) => {
    event.preventDefault();
    document.body.classList.toggle('dragging', name === 'dragover');
    if (name === 'drop') ask(event.dataTransfer.files);
  });
}
