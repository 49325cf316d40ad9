// Every text of the page, in both languages, and how elements get theirs.

// name: [English, 中文]
export const TEXTS = {
  skip: ["Skip to the message box", "跳到输入框"],
  model: ["Model", "模型"],
  tools: ["Tools", "工具"],
  conversation: ["Conversation", "对话"],
  newChat: ["New chat", "新对话"],
  otherLanguage: ["中文", "EN"],
  switchLanguage: ["中文 (switch language)", "EN（切换语言）"],
  switchTheme: ["Dark or light", "深色或浅色"],
  settings: ["Settings", "设置"],
  close: ["Close", "关闭"],
  cancel: ["Cancel", "取消"],
  done: ["Done", "完成"],

  welcome: ["What shall we talk about?", "想聊点什么？"],
  welcomeMore: [
    "The model runs on this server's own GPUs. The conversation stays in this tab, and ends with it.",
    "模型运行在这台服务器自己的 GPU 上。对话只保存在此标签页中，关闭即消失。",
  ],
  message: ["Message", "消息"],
  attach: ["Attach an image", "添加图片"],
  attachedImages: ["Attached images", "已添加的图片"],
  attachedImage: ["Image {number}", "图片 {number}"],
  removeImage: ["Remove the image", "移除图片"],
  send: ["Send", "发送"],
  stop: ["Stop", "停止"],
  newest: ["To the newest line", "跳到最新一行"],
  you: ["You", "你"],
  edit: ["Edit the question", "编辑问题"],
  editMore: ["What follows this question will be removed.", "此问题之后的内容将被删除。"],
  regenerate: ["Regenerate the answer", "重新生成回答"],
  regenerateHere: ["Regenerate this answer, and remove what follows", "重新生成此回答，并删除之后的内容"],
  switchThinking: ["Thinking", "思考"],
  thinkingDefault: ["Thinking: default", "思考：默认"],
  thinkingOn: ["Thinking: on", "思考：开"],
  thinkingOff: ["Thinking: off", "思考：关"],
  thinking: ["Thinking …", "思考中……"],
  reasoning: ["Reasoning", "思考过程"],
  waitingForAnswer: ["Waiting for the answer", "正在等待回答"],
  answerBegins: ["The answer begins.", "开始回答。"],
  answerEnded: ["The answer is complete.", "回答完毕。"],
  copy: ["Copy", "复制"],
  copied: ["Copied", "已复制"],
  notCopied: ["The browser refused to copy", "浏览器拒绝复制"],
  retry: ["Try again", "重试"],
  retryIn: ["Try again in {seconds} s", "{seconds} 秒后重试"],
  usage: ["{tokens} tokens", "{tokens} 个 token"],
  usageWithSpeed: ["{tokens} tokens · {speed} a second", "{tokens} 个 token · 每秒 {speed} 个"],
  stopped: ["stopped", "已停止"],
  tokenLimit: ["ended by the token limit", "达到 token 上限而结束"],

  noImages: ["This model takes no images.", "此模型不支持图片。"],
  tooManyImages: ["At most {images} images in a conversation.", "一次对话最多 {images} 张图片。"],
  notAnImage: ["{name} is no image that the browser can read.", "浏览器无法读取图片 {name}。"],

  queueFull: ["The queue is full.", "等待队列已满。"],
  queueFullMore: [
    "The server is answering as many requests as its memory holds.",
    "服务器正在处理的请求已达到显存所能容纳的上限。",
  ],
  notReady: ["The engine is not ready.", "引擎尚未就绪。"],
  brokeOff: ["The answer broke off.", "回答中断了。"],
  brokeOffMore: ["The connection ended before the answer did.", "连接在回答结束之前断开了。"],
  unreachable: ["The server does not answer.", "服务器没有响应。"],
  unreachableMore: ["Is it still running, and the network up?", "请检查它是否仍在运行、网络是否正常。"],
  tooLong: ["The conversation is too long for the model.", "对话超出了模型的上下文长度。"],
  tooLongMore: [
    "Start a new chat, or ask for fewer tokens in the settings.",
    "请开始新对话，或在设置中减少最多生成的 token 数。",
  ],
  refused: ["The server refused the request.", "服务器拒绝了请求。"],

  systemPrompt: ["System prompt", "系统提示词"],
  temperature: ["Temperature", "温度"],
  maxTokens: ["Max tokens", "最多生成 token 数"],
  serverDefault: ["server's default", "服务器默认"],
  whereKept: [
    "Settings are kept in this browser; the conversation and the key in this tab only.",
    "设置保存在此浏览器中；对话和密钥只保存在此标签页中。",
  ],
  forget: ["Forget everything", "清除全部"],
  keyNeeded: ["This server asks for a key", "此服务器需要密钥"],
  keyWrong: ["The server did not accept that key.", "服务器不接受该密钥。"],
  key: ["API key", "API 密钥"],
  keyKept: ["It is kept in this tab only.", "密钥只保存在此标签页中。"],
  useKey: ["Use it", "使用"],

  server: ["Server", "服务器"],
  running: ["running", "运行中"],
  waiting: ["waiting", "等待中"],
  speed: ["tokens a second", "token/秒"],
  pages: ["KV cache pages", "KV 缓存页"],
  pagesUsed: ["{used} of {total} in use", "已用 {used}，共 {total}"],
  replica: ["Replica {number}", "副本 {number}"],
  weights: ["Weights", "权重"],
  kvCache: ["KV cache", "KV 缓存"],
  rest: ["The rest", "其余"],
  free: ["Free", "空闲"],
  forecast: ["Forecast", "预测"],
  reservedOf: ["{reserved} of {budget}", "{reserved}，共 {budget}"],
  plannedOf: ["{forecast} planned of {budget}", "计划 {forecast}，共 {budget}"],
  forecastIs: ["forecast {forecast}", "预测 {forecast}"],
  aboveForecast: ["{bytes} above the forecast", "超出预测 {bytes}"],
  aboveBudget: ["{bytes} above the budget", "超出预算 {bytes}"],
  busy: ["{share} busy", "占用率 {share}"],
  barIs: [
    "{device}: {reserved} reserved of {budget}; forecast {forecast}",
    "{device}：已占用 {reserved}，共 {budget}；预测 {forecast}",
  ],
  capacity: [
    "Up to {sequences} requests at once, of up to {tokens} tokens each.",
    "最多同时处理 {sequences} 个请求，每个最多 {tokens} 个 token。",
  ],
  version: ["duoka {version}", "duoka {version}"],
  stateConnecting: ["Connecting", "连接中"],
  stateReady: ["Ready", "就绪"],
  stateSome: ["{ready} of {total} ready", "{ready}/{total} 就绪"],
  stateStarting: ["Starting", "启动中"],
  stateRestarting: ["Restarting", "重启中"],
  stateFailed: ["Failed", "已失效"],
  stateUnreachable: ["No answer", "无响应"],
  stateKey: ["Key needed", "需要密钥"],
  bannerStarting: ["The model is being loaded; this page notices when it is ready.", "正在加载模型，就绪后本页会自动更新。"],
  bannerRestarting: ["The engine stopped and is being restarted.", "引擎已停止，正在重启。"],
  bannerFailed: ["The engine stopped and could not be restarted.", "引擎已停止，无法重启。"],
  bannerUnreachable: ["The server does not answer. Trying again …", "服务器没有响应，正在重试……"],
};

let column = 0;

export const locale = () => ["en", "zh-CN"][column];

export function text(name, values = {}) {
  return TEXTS[name][column].replace(/\{(\w+)\}/g, (_, value) => values[value]);
}

/** Gives an element a text that follows the language. */
export function say(node, name, values = {}) {
  return translated(node, "text", name, values);
}

/** Gives an element a name for pointers and screen readers. */
export function label(node, name, values = {}) {
  return translated(node, "label", name, values);
}

function translated(node, kind, name, values) {
  node.dataset[kind] = name;
  const written = JSON.stringify(values);
  if (written !== "{}") node.dataset.values = written;
  else delete node.dataset.values;
  translate(node);
  return node;
}

function translate(node) {
  const { text: textName, label: labelName, placeholder, values } = node.dataset;
  const filled = values ? JSON.parse(values) : {};
  // What hasn't changed isn't set again: screen readers would read it out once a second.
  if (textName && node.textContent !== text(textName, filled)) {
    node.textContent = text(textName, filled);
  }
  if (placeholder) node.placeholder = text(placeholder, filled);
  if (labelName) {
    node.setAttribute("aria-label", text(labelName, filled));
    if (node.tagName === "BUTTON") node.title = text(labelName, filled);
  }
}

/** "en" or "zh", for the whole page. */
export function setLanguage(language) {
  column = language === "zh" ? 1 : 0;
  document.documentElement.lang = locale();
  for (const node of document.querySelectorAll("[data-text], [data-label], [data-placeholder]")) {
    translate(node);
  }
}

export const currentLanguage = () => ["en", "zh"][column];

export const formatNumber = (value, digits = 0) =>
  value.toLocaleString(locale(), { maximumFractionDigits: digits });

/** GiB, or MiB where there is something and it is less than a tenth of one. */
export function formatBytes(bytes) {
  const gib = bytes / 2 ** 30;
  if (bytes === 0 || Math.abs(gib) >= 0.1) return `${formatNumber(gib, 1)} GiB`;
  return `${formatNumber(bytes / 2 ** 20, Math.abs(bytes) < 10 * 2 ** 20 ? 1 : 0)} MiB`;
}
